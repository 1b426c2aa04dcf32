"""The offline check: every back end that is usable here against formulas in float64, without a model.

Distances are relative L2, of outputs and of the gradient of every input. A tensor that is next to nothing, as
the decay's gradient is where everything is forgotten, is measured against FLOOR of the gradient that came in,
which is random of variance 1.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llamafactory_ascend.kernels import varlen
from llamafactory_ascend.kernels.backends import Backend
from llamafactory_ascend.kernels.forms import FORMS
from llamafactory_ascend.kernels.offline_cases import Case, full_size
from llamafactory_ascend.kernels.selection import Conditions, refusal

# A few times what a right kernel loses to rounding: products in bfloat16 keep 8 bits, in float16 11, and what
# devices call float32 products may keep no more than 11 (HF32, TF32).
LIMITS = {"float32": 2e-3, "float16": 5e-3, "bfloat16": 3e-2}
FLOOR = 1e-5
FULL_DTYPE = "bfloat16"


@dataclass(frozen=True)
class Verdict:
    """What came of one case.

    Attributes:
        errors: "output", "output_1", "d_NAME" -> relative L2 distance.
        failure: what the back end raised, "" if it did not.
        peak: peak bytes of the device in forward and backward, inputs included; None where nobody counts.
    """

    operator: str
    backend: str
    case: str
    dtype: str
    limit: float
    errors: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    peak: int | None = None

    @property
    def worst(self) -> tuple[str, float]:
        """Return the tensor that is farthest off; what is no number is farther than any."""
        return max(self.errors.items(), key=lambda one: math.inf if math.isnan(one[1]) else one[1])

    @property
    def passed(self) -> bool:
        return not self.failure and all(error <= self.limit for error in self.errors.values())

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; what is not finite as text, because JSON has no such number."""
        errors = {
            name: float(f"{error:.3g}") if math.isfinite(error) else str(error)
            for name, error in self.errors.items()
        }
        return {
            "operator": self.operator,
            "backend": self.backend,
            "case": self.case,
            "dtype": self.dtype,
            "passed": self.passed,
            "limit": self.limit,
            "errors": errors,
            "failure": self.failure,
            "peak_bytes": self.peak,
        }


def sort_out(
    backends: Iterable[Backend], conditions: Conditions
) -> tuple[list[Backend], list[tuple[Backend, str]]]:
    """Return the back ends that can be used here, and the others with the reason."""
    usable, refused = [], []
    for backend in sorted(backends, key=lambda one: (one.operator, one.order)):
        reason = refusal(backend, conditions)
        if reason:
            refused.append((backend, reason))
        else:
            usable.append(backend)
    return usable, refused


def suits(backend: Backend, case: Case) -> bool:
    """True where a case is of the back end's operator, and packed only if it keeps samples apart."""
    return case.operator == backend.operator and (case.bounds is None or backend.varlen)


def check(backend: Backend, case: Case, dtype: str, device: str) -> Verdict:
    """Compute a case with a back end and hold it against the reference.

    Args:
        dtype: "float32", "float16" or "bfloat16"; the reference gets the inputs rounded to it.
        device: where the back end computes; the reference is computed on the CPU.

    Returns:
        The verdict; an exception of the back end is one too.
    """
    given = _rounded(case, getattr(torch, dtype))
    verdict = (case.operator, backend.name, case.name, dtype, LIMITS[dtype])
    try:
        actual = _run_backend(backend, case, given, device)
    except Exception as error:  # of a compiler, a driver, a launch: whatever it is, the back end is unusable
        return Verdict(*verdict, failure=_sentence(error))
    expected = _run_reference(case, given)
    return Verdict(*verdict, errors=_distances(actual, expected))


def check_full_size(backend: Backend, device: str) -> Verdict:
    """Compute the gated delta rule at its full size in bfloat16; compare the first and the last key head.

    Heads do not see each other, so that the reference of two key heads, with their value heads, is exact.
    """
    case = full_size()
    given = _rounded(case, getattr(torch, FULL_DTYPE))
    verdict = (case.operator, backend.name, case.name, FULL_DTYPE, LIMITS[FULL_DTYPE])
    memory = getattr(torch, device.partition(":")[0])
    counts = hasattr(memory, "reset_peak_memory_stats")
    try:
        if counts:
            memory.reset_peak_memory_stats()
        actual = _run_backend(backend, case, given, device)
        peak = int(memory.max_memory_allocated()) if counts else None
    except Exception as error:
        return Verdict(*verdict, failure=_sentence(error))
    heads = {name: _first_and_last(x.shape[2], given["key"].shape[2]) for name, x in given.items()}
    part = {name: x[:, :, heads[name]] for name, x in given.items()}
    places = {"output": heads["value"], **{f"d_{name}": place for name, place in heads.items()}}
    kept = {name: x[:, :, places[name]] for name, x in actual.items()}
    (towards,) = _directions([given["value"]], given["value"].dtype)
    expected = _run_reference(case, part, [towards[:, :, heads["value"]]])
    return Verdict(*verdict, errors=_distances(kept, expected), peak=peak)


def _first_and_last(heads: int, key_heads: int) -> list[int]:
    group = heads // key_heads
    return [*range(group), *range(heads - group, heads)]


def _rounded(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x if name in case.wide else x.to(dtype) for name, x in case.tensors.items()}


def _directions(outputs: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the gradient that comes in for each output, always the same, in the dtype of the inputs."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(x.shape, generator=generator).to(dtype) for x in outputs]


def _run_backend(backend: Backend, case: Case, given: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    function = FORMS[case.form].adapt(backend.load(), backend)
    leaves = _leaves(case, {name: x.to(device) for name, x in given.items()})
    sequences = None
    if case.bounds is not None:
        sequences = varlen.of_cu_seqlens(torch.tensor(case.bounds, device=device), case.bounds[-1])
    with varlen.using(sequences):
        outputs = case.call(function, leaves)
    return _with_gradients(case, leaves, outputs, _directions(outputs, _dtype(case, given)))


def _run_reference(
    case: Case, given: dict[str, Tensor], towards: list[Tensor] | None = None
) -> dict[str, Tensor]:
    leaves = _leaves(case, {name: x.double() for name, x in given.items()})
    outputs = case.reference(leaves)
    return _with_gradients(case, leaves, outputs, towards or _directions(outputs, _dtype(case, given)))


def _dtype(case: Case, given: dict[str, Tensor]) -> torch.dtype:
    return next(x.dtype for name, x in given.items() if name not in case.wide)


def _leaves(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: x.detach().clone().requires_grad_(name not in case.constants) for name, x in tensors.items()
    }


def _with_gradients(
    case: Case, leaves: dict[str, Tensor], outputs: tuple[Tensor, ...], towards: list[Tensor]
) -> dict[str, Tensor]:
    """Return outputs and input gradients by name, in float64 on the CPU."""
    towards = [d.to(x.device, x.dtype) for d, x in zip(towards, outputs, strict=True)]
    wanted = {name: x for name, x in leaves.items() if name not in case.constants}
    gradients = torch.autograd.grad(outputs, list(wanted.values()), towards)
    named = {f"output_{place}" if place else "output": x for place, x in enumerate(outputs)}
    named |= {f"d_{name}": x for name, x in zip(wanted, gradients, strict=True)}
    return {name: x.detach().cpu().double() for name, x in named.items()}


def _distances(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    found = {}
    floor = FLOOR * math.sqrt(expected["output"].numel())
    for name, right in expected.items():
        got = actual[name]
        size = max(float(right.norm()), floor)
        found[name] = float((got - right).norm()) / size if got.shape == right.shape else math.inf
    return found


def _sentence(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {text}"
