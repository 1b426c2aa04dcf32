"""The chunked loss against the loss of Transformers, and the memory it takes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from llamafactory_ascend.kernels.linear_cross_entropy import (
    chunk_rows,
    label_likelihoods,
    linear_cross_entropy,
)


def inputs(dtype: torch.dtype, rows: int = 200, width: int = 24, vocabulary: int = 600) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) / width**0.5
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.4] = -100
    return hidden.to(dtype), weight.to(dtype), labels


def stock(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As ForCausalLMLoss: logits in the model's dtype, the rest in float32, or in float64."""
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels, reduction="sum")


def evaluate(
    function: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float
) -> tuple[Tensor, ...]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(hidden, weight, labels)
    (loss * scale).backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)], ids=str
)
def test_loss_and_gradients_equal_those_of_the_whole_logits(dtype: torch.dtype, bound: float) -> None:
    """200 rows are 3 chunks and a rest; the error is that of the dtype, no larger than stock's twice over."""
    given = inputs(dtype)
    exact = evaluate(stock, *(x.double() if x.is_floating_point() else x for x in given), scale=1 / 64)
    ours = evaluate(linear_cross_entropy, *given, scale=1 / 64)
    theirs = evaluate(stock, *given, scale=1 / 64)
    assert [x.dtype for x in ours] == [torch.float32, dtype, dtype]
    for found, other, wanted in zip(ours, theirs, exact, strict=True):
        assert distance(found, wanted) < bound
        assert distance(found, wanted) < 2 * distance(other, wanted) + 1e-6


def stock_likelihoods(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
    return found.where(labels != -100, 0)


def weighed(function: Any) -> Any:
    """Make a number of likelihoods, each of which counts for something else."""
    return lambda hidden, *rest: (
        function(hidden, *rest)
        @ torch.linspace(-1, 2, len(hidden)).to(
            torch.float64 if hidden.dtype == torch.float64 else torch.float32
        )
    )


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)], ids=str
)
def test_likelihoods_and_their_gradients_are_those_of_the_whole_logits(
    dtype: torch.dtype, bound: float
) -> None:
    given = inputs(dtype)
    found = label_likelihoods(*given)
    wanted = stock_likelihoods(*(x.double() if x.is_floating_point() else x for x in given))
    assert found.dtype == torch.float32 and distance(found, wanted) < bound
    assert torch.equal(found == 0, given[2] == -100)
    exact = evaluate(
        weighed(stock_likelihoods), *(x.double() if x.is_floating_point() else x for x in given), scale=1 / 64
    )
    ours = evaluate(weighed(label_likelihoods), *given, scale=1 / 64)
    theirs = evaluate(weighed(stock_likelihoods), *given, scale=1 / 64)
    assert [x.dtype for x in ours] == [torch.float32, dtype, dtype]
    for found, other, right in zip(ours, theirs, exact, strict=True):
        assert distance(found, right) < 2 * distance(other, right) + 2e-6


def test_positions_without_a_label_get_no_gradient_and_cost_nothing() -> None:
    hidden, weight, labels = inputs(torch.float32)
    _, grad, _ = evaluate(linear_cross_entropy, hidden, weight, labels, scale=1.0)
    assert torch.equal((grad == 0).all(-1), labels == -100)
    loss, grad, grad_weight = evaluate(
        linear_cross_entropy, hidden, weight, torch.full_like(labels, -100), scale=1.0
    )
    assert loss == 0 and not grad.any() and not grad_weight.any()


def test_autocast_multiplies_in_its_dtype_and_keeps_the_sum_in_float32() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
        wanted = F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")
    assert loss.dtype == torch.float32 and distance(loss, wanted) < 1e-6
    assert distance(loss, stock(hidden, weight, labels)) > 1e-6  # it did not multiply in float32


def test_frozen_head_keeps_one_gradient_of_the_size_of_the_supervised_states() -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    saved = [x for x in loss.grad_fn.saved_tensors if x is not None]  # type: ignore[union-attr]
    assert [tuple(x.shape) for x in saved] == [
        (int((labels != -100).sum()), 24),
        (int((labels != -100).sum()),),
    ]


class Largest(TorchDispatchMode):
    """Remembers the most numbers that a tensor had."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            self.numbers = max(self.numbers, tensor.numel() if isinstance(tensor, Tensor) else 0)
        return result


def test_no_tensor_is_larger_than_the_logits_of_a_chunk() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with Largest() as ours:
        linear_cross_entropy(hidden.requires_grad_(), weight, labels).backward()
    with Largest() as theirs:
        stock(hidden, weight, labels).backward()
    assert (ours.numbers, theirs.numbers) == (32 * 600, 200 * 600)


@pytest.mark.parametrize(
    ("rows", "width", "vocabulary", "wanted"), [(4096, 5120, 248320, 85), (200, 24, 600, 32), (8, 64, 32, 32)]
)
def test_logits_of_a_chunk_are_as_many_numbers_as_the_hidden_states(
    rows: int, width: int, vocabulary: int, wanted: int
) -> None:
    assert chunk_rows(rows, width, vocabulary) == wanted
