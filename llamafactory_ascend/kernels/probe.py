"""The numerical probe: what stood there before against what replaces it, on live tensors, once.

Runs inside the first forward call of step 1, before anything is computed with the replacement. It draws no
random number, touches no `.grad`, and leaves nothing in the graph of the step.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LIMIT = 0.05  # relative L2; kernels that are right stay below 0.01 in bfloat16
Call = Callable[..., Any]


@dataclass(frozen=True)
class Comparison:
    """Relative L2 distances of output and input gradients.

    Attributes:
        errors: "output", "d_0", "d_1", ... (gradients by place among the floating tensors) -> distance; the
            same names behind "packed " are of a call on packed samples.
        reference: "live dtype", or "float32" where the old code is itself beyond the limit from its own
            result in float32.
        skipped: why nothing could be compared, "" if it was.
    """

    errors: dict[str, float] = field(default_factory=dict)
    reference: str = "live dtype"
    skipped: str = ""

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0, key=lambda x: math.inf if math.isnan(x) else x)

    @property
    def passed(self) -> bool:
        return all(error <= LIMIT for error in self.errors.values())

    def with_packed(self, packed: "Comparison") -> "Comparison":
        """Return this comparison and the one of a packed call as one."""
        errors = {**self.errors, **{f"packed {name}": error for name, error in packed.errors.items()}}
        reference = packed.reference if self.reference == "live dtype" else self.reference
        return Comparison(errors, reference, self.skipped or packed.skipped)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; what is not finite as text, because JSON has no such number."""
        errors = {
            key: float(f"{value:.3g}") if math.isfinite(value) else str(value)
            for key, value in self.errors.items()
        }
        return {"errors": errors, "reference": self.reference, "skipped": self.skipped, "limit": LIMIT}


def compare(
    old: Call, new: Call, args: tuple[Any, ...], kwargs: dict[str, Any], constants: tuple[int, ...] = ()
) -> Comparison:
    """Call both with copies of the same tensors and compare outputs and gradients.

    Args:
        old, new: called as `f(*args, **kwargs)`; of a tuple the tensors count.
        args, kwargs: of the live call, shortened if it is long; its tensors are not changed.
        constants: places of arguments that no gradient flows to.

    Returns:
        The comparison; skipped where the device has no memory for it, or where the old code itself makes no
        numbers (of a broken model, say), for which the new code is not to blame.

    Raises:
        Exception: what `new` raises (a kernel that does not compile, for one).
    """
    try:
        expected = _run(old, args, kwargs, constants)
        actual = _run(new, args, kwargs, constants)
        dtypes = [[x.dtype for x in result.outputs] for result in (expected, actual)]
        if dtypes[0] != dtypes[1]:  # the next operator would not take it
            raise TypeError(f"it returns {dtypes[1]} where {dtypes[0]} is expected")
        floor = _floors(expected)
        found = Comparison(_distances(expected, actual, floor))
        if not found.passed:
            with _no_autocast(args, kwargs):  # under it, float32 tensors are multiplied in bfloat16 too
                wide = _run(old, *_as_float32(args, kwargs), constants)
            if not _is_finite(wide):
                return Comparison(skipped="the old code's own results are NaN or infinite, in float32 too")
            if not Comparison(_distances(wide, expected, floor)).passed:
                # the old code cannot judge in this dtype
                found = Comparison(_distances(wide, actual, floor), "float32")
    except torch.OutOfMemoryError:
        return Comparison(skipped="the device has no memory to spare for it")
    return found


@dataclass(frozen=True)
class _Result:
    """A call on detached copies: what went in, what came out, and its gradients, None where there is none."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    gradients: list[Tensor | None]


def _run(function: Call, args: Any, kwargs: Any, constants: tuple[int, ...]) -> _Result:
    leaves: list[Tensor] = []

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[-1]
        return value

    args = tuple(value if place in constants else copy(value) for place, value in enumerate(args))
    kwargs = {key: copy(value) for key, value in kwargs.items()}
    # Under a checkpoint every tensor that is saved for backward goes through its hooks and is expected
    # again in the recomputation. These innermost ones keep the probe's own tensors out of that.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        result = function(*args, **kwargs)
        outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]
        outputs = [x for x in outputs if x.requires_grad]
        gradients = torch.autograd.grad(outputs, leaves, [_direction(x) for x in outputs], allow_unused=True)
    return _Result([x.detach() for x in leaves], [x.detach() for x in outputs], list(gradients))


def _is_finite(result: _Result) -> bool:
    tensors = (*result.outputs, *(x for x in result.gradients if x is not None))
    return all(bool(x.isfinite().all()) for x in tensors)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _direction(output: Tensor) -> Tensor:
    """Return a gradient for an output: no constant, which norms would map to zero, and no random number."""
    steps = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    return torch.cos(steps * 0.7).reshape(output.shape).to(output.dtype)


def _floors(result: _Result) -> list[float]:
    """Return, for each input, the norm of a gradient below which its digits are rounding.

    A gradient of ordinary size is ||direction|| * rms(output) / rms(input), for an input of the order of 1 or
    more (a smaller one, a logarithm for one, says nothing of its own scale). Where terms of that size cancel,
    what is left over differs by some eps of it between any two right implementations: 20 eps leave room for
    one eps within LIMIT, and sqrt(eps) for the long sums of a dtype with many digits.
    """
    eps = max((torch.finfo(x.dtype).eps for x in (*result.inputs, *result.outputs)), default=0.0)
    strength = sum(float(_direction(x).float().norm()) * _rms(x) for x in result.outputs)
    return [max(20 * eps, math.sqrt(eps)) * strength / max(_rms(x), 1.0) for x in result.inputs]


def _rms(x: Tensor) -> float:
    return float(x.float().norm()) / math.sqrt(max(x.numel(), 1))


def _distances(expected: _Result, actual: _Result, floors: list[float]) -> dict[str, float]:
    """Return name -> ||actual - expected|| / ||expected||, of a gradient over its floor at least.

    Infinite where there is no such output or it has another shape; a missing gradient is zero.
    """
    found = {}
    for place, old in enumerate(expected.outputs):
        new = actual.outputs[place] if place < len(actual.outputs) else None
        found[f"output_{place}" if place else "output"] = _distance(old, new, 0.0)
    pairs = zip(expected.inputs, expected.gradients, actual.gradients, floors, strict=True)
    for place, (x, before, after, floor) in enumerate(pairs):
        if before is not None or after is not None:
            old, new = (torch.zeros_like(x) if one is None else one for one in (before, after))
            found[f"d_{place}"] = _distance(old, new, floor)
    return found


def _distance(old: Tensor, new: Tensor | None, floor: float) -> float:
    if new is None or new.shape != old.shape:
        return math.inf
    norm, distance = float(old.float().norm()), float((new.float() - old.float()).norm())
    return distance / (max(norm, floor) or 1.0)


def _no_autocast(args: Any, kwargs: Any) -> AbstractContextManager[Any]:
    tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if tensor is None or not torch.amp.autocast_mode.is_autocast_available(tensor.device.type):
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def _as_float32(args: Any, kwargs: Any) -> tuple[Any, Any]:
    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(widen(value) for value in args), {key: widen(value) for key, value in kwargs.items()}
