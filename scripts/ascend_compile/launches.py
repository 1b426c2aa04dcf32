"""Every kernel that a call would launch is compiled in place of the launch."""

from collections.abc import Callable
from typing import Any

from triton.runtime import autotuner, jit

from scripts.ascend_compile.compiler import BACKEND, Compiled, compile_kernel
from tests.kernels.pretended_npu import TARGET


class Launches:
    """Takes the place of launching.

    Attributes:
        compiled: a result for each specialisation (types, constants, divisibility), in order of their launch.
    """

    def __init__(self, on_result: Callable[[Compiled], None]) -> None:
        self.compiled: list[Compiled] = []
        self._seen: set[tuple[str, ...]] = set()
        self._on_result = on_result

    def install(self) -> None:
        """Replace launching in this process; an autotuned kernel keeps only its first configuration."""
        launches, plain = self, autotuner.Autotuner.__init__

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
            launches.take(kernel, args, kwargs)

        def initialize(
            tuner: Any, fn: Any, names: Any, configs: list[Any], *args: Any, **kwargs: Any
        ) -> None:
            plain(tuner, fn, names, configs[:1], *args, **kwargs)

        jit.JITFunction.run = run
        autotuner.Autotuner.__init__ = initialize

    def take(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile what would be launched, as `JITFunction.run` of triton-ascend 3.2.0 specialises it."""
        backend = BACKEND(TARGET)
        kwargs = {"debug": False, **{key: value for key, value in kwargs.items() if key != "stream"}}
        if kernel.binder is None:
            kernel.create_binder(backend)
        bound, types, constexprs, _, _ = kernel.binder(*args, **kwargs)
        key = (kernel.__name__, "".join(map(str, types)), str(constexprs))
        if key in self._seen:
            return
        self._seen.add(key)
        names = [kernel.params[place].name for place in kernel.non_constexpr_indices]
        signature = {
            name: "*i8" if kind == "none" else kind for name, kind in zip(names, types, strict=False)
        }
        values = tuple(bound.values())
        attrs = backend.get_attrs_descriptor(kernel.params, values)
        known = attrs.get_constants()
        constants = {
            parameter.name: value
            for value, parameter in zip(values, kernel.params, strict=True)
            if parameter.is_constexpr or parameter.num in known or value is None
        }
        result = compile_kernel(kernel, signature, constants, options=kwargs, attrs=attrs)
        self.compiled.append(result)
        self._on_result(result)
