"""The probe: what it measures, what it lets pass, and that it leaves no trace."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llamafactory_ascend.kernels import probe
from llamafactory_ascend.kernels.probe import Comparison, compare

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def old(x: Tensor) -> Tensor:
    return x * F.silu(x)


def test_equal_code() -> None:
    found = compare(old, old, (X,), {})
    assert found.errors == {"output": 0.0, "d_0": 0.0}
    assert found.passed and found.as_dict()["limit"] == 0.05


@pytest.mark.parametrize("factor, passed", [(1.01, True), (1.1, False)])
def test_the_distance_is_relative(factor: float, passed: bool) -> None:
    """A result that is too large by a factor is that far away, in output and gradient alike."""
    found = compare(old, lambda x: factor * old(x), (X,), {})
    assert found.worst == pytest.approx(factor - 1, rel=1e-3)
    assert found.passed is passed


def test_a_wrong_gradient_alone() -> None:
    """The outputs agree; a backward without the gate's part does not."""
    found = compare(old, lambda x: x * F.silu(x).detach() + (old(x) - x * F.silu(x)).detach(), (X,), {})
    assert found.errors["output"] < 1e-6
    assert found.errors["d_0"] > 0.05 and not found.passed


def test_what_is_missing_is_infinitely_far() -> None:
    found = compare(old, lambda x: old(x)[:4], (X,), {})
    assert found.worst == math.inf and not found.passed
    assert found.as_dict()["errors"]["output"] == "inf"


def test_nan_does_not_pass() -> None:
    found = compare(old, lambda x: old(x) * math.nan, (X,), {})
    assert math.isnan(found.worst) and not found.passed
    assert found.as_dict()["errors"]["output"] == "nan"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_tensors_that_are_no_numbers_are_not_put_down_to_the_new_code(bad: float) -> None:
    broken = X.clone()
    broken[0, 0] = bad
    found = compare(old, old, (broken,), {})
    assert found.passed and found.skipped.startswith("the old code's own results are NaN or infinite")
    assert compare(old, lambda x: 1.1 * old(x), (X,), {}).skipped == ""


def test_old_code_that_cannot_judge() -> None:
    """Where the old code is far from its own float32 result, that result is what the new code must meet."""

    def coarse(x: Tensor) -> Tensor:
        return x.cumsum(1) if x.dtype == torch.float32 else x.sum(1, keepdim=True) + 0 * x

    def fine(x: Tensor) -> Tensor:
        return x.float().cumsum(1).to(x.dtype)

    found = compare(coarse, fine, (X.bfloat16(),), {})
    assert found.reference == "float32" and found.passed
    assert not compare(coarse, lambda x: 1.1 * fine(x), (X.bfloat16(),), {}).passed


def test_old_code_that_autocast_spoils() -> None:
    """Its float32 result is computed without autocast, which would spoil that one as well."""
    signs = torch.tensor([[1.0], [-1.0]])
    x = torch.tensor([[1000.0, 999.0], [500.0, 497.0]])  # 999 and 497 are no bfloat16 numbers

    def exact(x: Tensor) -> Tensor:
        return x[:, :1] - x[:, 1:]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = compare(lambda x: (x @ signs).float(), exact, (x,), {})
        assert found.passed and found.reference == "float32"
        assert not compare(lambda x: (x @ signs).float(), lambda x: 1.1 * exact(x), (x,), {}).passed


def test_constants_get_no_gradient() -> None:
    table = torch.ones(16)
    assert set(compare(torch.mul, torch.mul, (X, table), {}).errors) == {"output", "d_0", "d_1"}
    assert set(compare(torch.mul, torch.mul, (X, table), {}, (1,)).errors) == {"output", "d_0"}


def test_another_dtype_is_an_error() -> None:
    """The next operator would not take it."""
    with pytest.raises(TypeError, match="bfloat16"):
        compare(old, lambda x: old(x).bfloat16(), (X,), {})


def test_out_of_memory_is_no_verdict() -> None:
    def greedy(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    found = compare(greedy, old, (X,), {})
    assert found.passed and found.skipped.startswith("the device has no memory")


def test_what_the_new_code_raises_comes_out() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("ub overflow detected")

    with pytest.raises(RuntimeError, match="ub overflow"):
        compare(old, broken, (X,), {})


def test_no_trace_under_a_checkpoint() -> None:
    """Inside a checkpointed layer: same result and gradients, same random state, no `.grad` on a weight."""
    weight = torch.ones(16, requires_grad=True)
    comparisons: list[Comparison] = []

    def layer(x: Tensor, probed: bool) -> Tensor:
        if probed and not comparisons:
            comparisons.append(compare(lambda y: old(y) * weight, lambda y: weight * old(y), (x,), {}))
        return F.dropout(old(x) * weight, 0.5)

    results = []
    for probed in (False, True):
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        output = checkpoint(layer, x, probed, use_reentrant=False)
        assert weight.grad is None
        gradients = torch.autograd.grad(output.sum(), (x, weight))
        results.append((output, *gradients, torch.random.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert comparisons[0].errors == {"output": 0.0, "d_0": 0.0}


def test_direction_depends_on_nothing() -> None:
    assert torch.equal(probe._direction(X), probe._direction(2 * X))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_cancels(dtype: torch.dtype) -> None:
    """What is left of a gradient of zero is rounding, another in each implementation; a wrong one shows."""
    shift = torch.linspace(0.1, 1.0, 16)

    def growing(x: Tensor, s: Tensor) -> Tensor:
        return x * (1.1 * s).exp() * (-1.1 * s).exp()

    def even(x: Tensor, s: Tensor) -> Tensor:
        return x * (0.7 * s).exp() * (-0.7 * s).exp()

    def wrong(x: Tensor, s: Tensor) -> Tensor:
        return growing(x, s) + 0.03 * x * (s - s.detach())

    inputs = (X.to(dtype), shift.to(dtype))
    left = [
        torch.autograd.grad(f(inputs[0], s), s, probe._direction(X).to(dtype))[0]
        for f in (growing, even)
        for s in [inputs[1].clone().requires_grad_()]
    ]
    assert (left[0] - left[1]).norm() > 0.5 * left[0].norm() > 0  # nothing in common
    found = compare(growing, even, inputs, {})
    assert found.passed and found.errors["d_1"] < probe.LIMIT, found
    caught = compare(growing, wrong, inputs, {})
    assert caught.errors["output"] < 0.01 and caught.errors["d_1"] > probe.LIMIT, caught


def test_a_small_gradient_that_is_none_of_rounding() -> None:
    """A thousandth of what is usual is still compared in float32: the floor is far below."""

    def faint(x: Tensor, s: Tensor) -> Tensor:
        return x * (1 + 0.001 * s)

    found = compare(faint, lambda x, s: x * (1 + 0.001 * s.detach()) + 0 * s, (X, torch.ones(16)), {})
    assert found.errors["d_1"] > 0.5 and found.errors["output"] < 1e-6


def test_a_gradient_where_there_is_none() -> None:
    """The old code does not depend on an input; new code that says it does is wrong, as is the reverse."""
    other = torch.ones(16)
    found = compare(lambda x, s: old(x), lambda x, s: old(x) + 0.1 * (s - s.detach()), (X, other), {})
    assert found.errors["d_1"] > 0.05
    found = compare(lambda x, s: old(x) + 0.1 * (s - s.detach()), lambda x, s: old(x), (X, other), {})
    assert found.errors["d_1"] > 0.05 and math.isfinite(found.worst)
    assert compare(lambda x, s: old(x), lambda x, s: old(x), (X, other), {}).passed
