"""The convolution against conv1d in float64, whole and packed."""

import pytest
import torch

from llamafactory_ascend.kernels import varlen
from llamafactory_ascend.kernels.causal_conv1d import causal_conv1d, reference
from tests.kernels.reference import error

LENGTHS = [5, 1, 2, 9]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make(dtype: torch.dtype = torch.float32, width: int = 4, tokens: int = 17) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, 6, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(6, width, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(6, generator=generator).to(dtype).requires_grad_()
    return x, weight, bias, torch.randn(1, tokens, 6, generator=generator).to(dtype)


def packed_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, packed: bool) -> torch.Tensor:
    """Each sample alone, through Transformers' path."""
    parts = x.split(LENGTHS, 1) if packed else [x]
    return torch.cat(
        [reference(part.transpose(1, 2), weight, bias, "silu").transpose(1, 2) for part in parts], 1
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_against_float64(dtype: torch.dtype, width: int, packed: bool) -> None:
    x, weight, bias, d_output = make(dtype, width)
    sequences = varlen.of_cu_seqlens(torch.tensor([0, 5, 6, 8, 17]), 17) if packed else None
    output = causal_conv1d(x, weight, bias, "silu", sequences=sequences)
    gradients = torch.autograd.grad(output, (x, weight, bias), d_output)
    wide = [value.detach().double().requires_grad_() for value in (x, weight, bias)]
    expected = packed_reference(*wide, packed)
    truth = torch.autograd.grad(expected, wide, d_output.double())
    assert output.dtype == dtype
    for actual, right in zip((output, *gradients), (expected, *truth), strict=True):
        assert error(actual, right) < TOLERANCE[dtype]


def test_packing_without_boundaries_leaks() -> None:
    """What the mask prevents: the first tokens of a sample see the last of the one before."""
    x, weight, bias, _ = make()
    alone = packed_reference(x, weight, bias, True)
    assert error(causal_conv1d(x, weight, bias, "silu"), alone) > 0.1


def test_shorter_than_the_kernel() -> None:
    x, weight, bias, _ = make(tokens=2)
    expected = reference(x.transpose(1, 2), weight, bias, None).transpose(1, 2)
    assert error(causal_conv1d(x, weight, bias, None), expected) < 1e-6


def test_unknown_activation() -> None:
    x, weight, _, _ = make()
    with pytest.raises(ValueError, match="gelu"):
        causal_conv1d(x, weight, None, "gelu")
