"""A switch: what a model calls in place of an operator.

It knows the old code and the usable back ends, tries the first one out when it is first called, and turns to
the next where it fails.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.kernels import probe, samples, varlen
from llamafactory_ascend.kernels.backends import Backend
from llamafactory_ascend.kernels.forms import Form
from llamafactory_ascend.kernels.selection import STOCK, Choice

Call = Callable[..., Any]


class Switch:
    """Stands where a model's code calls an operator.

    Attributes:
        operator, place: what it computes and the class or function that it stands for.
        original: the old code.
        explicit: the user named the back end, so that nothing else may be used.
        say: called with a sentence for the user, once at most.
        packed: samples share rows, so that the old code would mix them.
        armed: the next call is the first of a training step, which the probe looks at.
        comparison: what the probe found.
        counting: called with the operator at every call, while calls are counted.
        failures: back end -> why it was given up.
    """

    def __init__(
        self, operator: str, place: str, original: Call, form: Form, choice: Choice, say: Call, packed: bool
    ) -> None:
        self.operator, self.place, self.original = operator, place, original
        self.explicit, self.say, self.packed = choice.explicit, say, packed
        self.armed = False
        self.comparison: probe.Comparison | None = None
        self.counting: Callable[[str], None] | None = None
        self.failures: dict[str, str] = {}
        self._form = form
        self._waiting = list(choice.usable)
        self._backend: Backend | None = None
        self._active: Call | None = None
        self._tried = False
        self.__name__ = self.__qualname__ = getattr(original, "__name__", operator)

    @property
    def backend(self) -> str:
        """Return the name of what computes now."""
        if self._backend is not None:
            return self._backend.name
        return self._waiting[0].name if self._waiting else STOCK

    @property
    def settled(self) -> bool:
        """True once nothing can be given up any more: what computes has been probed, or is the old code."""
        return self.comparison is not None or not self._waiting

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.counting is not None and not torch.compiler.is_compiling():
            self.counting(self.operator)
        if (self.armed or not self._tried) and not torch.compiler.is_compiling():
            self._try(args, kwargs)
        if self._active is None or not self._on_its_device(args, kwargs):
            if self.packed and varlen.current() is not None:
                raise AscendError(
                    f"{self.operator}: packed samples reach code that cannot keep them apart ({self.place})",
                    "set `packing: false` and `neat_packing: false`",
                )
            return self.original(*args, **kwargs)
        return self._active(*args, **kwargs)

    def _on_its_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        assert self._backend is not None
        if not self._backend.devices:
            return True
        tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        return tensor is None or tensor.device.type in self._backend.devices

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the first back end that works on this call and, in a training step, that computes the same."""
        while self._active is not None or self._waiting:
            try:
                if self._active is None:
                    self._backend = self._waiting[0]
                    self._active = self._form.adapt(self._backend.load(), self._backend)
                if not self._on_its_device(args, kwargs):
                    return  # a call from elsewhere: nothing is known yet
                if self.armed:
                    self.comparison = self._compare(self._active, args, kwargs)
                    if not self.comparison.passed:
                        self._give_up(
                            f"it differs from {self.place} by {self.comparison.worst:.1%} "
                            f"(limit {probe.LIMIT:.0%}): {self.comparison.as_dict()['errors']}"
                        )
                        continue
                elif not self._tried:
                    with torch.no_grad():
                        self._active(*args, **kwargs)
                break
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if isinstance(error, _Refused):
                    raise
                self._give_up(f"its first use failed: {type(error).__name__}: {_first_line(error)}")
        self.armed, self._tried = False, True

    def _compare(self, new: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> probe.Comparison:
        """Probe the call as it is without packing and, where samples share rows, the packed one as well.

        A batch without packed samples may come first and one with them next, and the other way round.
        """
        form = self._form
        with varlen.using(None):
            found = probe.compare(self.original, new, *form.shorten(args, kwargs), form.constants)
            if form.samples is None or found.skipped or not found.passed:
                return found
        sequences = form.samples.sequences(args, kwargs)
        if sequences is None and not self.packed:
            return found
        packed = samples.pack(form.samples, self.original, new, args, kwargs, sequences)
        if packed is None:
            return found
        with varlen.using(None):
            return found.with_packed(probe.compare(*packed, form.constants))

    def _give_up(self, reason: str) -> None:
        """Turn to the next back end, with one message for the first that is given up.

        Raises:
            AscendError: the user named this one, or only the old code is left and samples are packed.
        """
        assert self._backend is not None
        name = self._backend.name
        self.failures[name] = reason
        if self._waiting:
            self._waiting.pop(0)
        self._backend = self._active = self.comparison = None
        if self.explicit:
            raise _Refused(
                f"`ascend.kernels`: {self.operator}: {name} cannot be used for {self.place}: {reason}",
                f"write `{self.operator}: auto` or `off` under `ascend.kernels`",
            )
        if not self._waiting and self.packed:
            raise _Refused(
                f"{self.operator}: {name}: {reason}; what is left cannot keep packed samples apart",
                "set `packing: false` and `neat_packing: false`",
            )
        if len(self.failures) == 1:
            self.say(
                f"{self.operator}: {name} is not used for {self.place}: {reason}. {self.backend} computes it"
            )

    def follow(self, failures: Mapping[str, str], rank: int) -> None:
        """Give up, between two steps, what another rank had to give up; the next call probes what follows.

        A kernel that is wrong for the tensors of one rank is not to be trusted by the others, which may have
        passed by the case.
        """
        for name, reason in failures.items():
            if self.backend == name:
                self._backend = self._waiting[0]
                self._give_up(f"on rank {rank} {reason}")
                self.armed, self._tried = bool(self._waiting), not self._waiting

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for the report."""
        found = {
            "operator": self.operator,
            "place": self.place,
            "backend": self.backend,
            "given_up": self.failures,
        }
        return {**found, "probe": self.comparison.as_dict() if self.comparison else None}


class _Refused(AscendError):
    """Ends the search for a back end."""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
