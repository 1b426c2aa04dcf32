"""The rotation by products against linear solves in float64 and PEFT's own code."""

import pytest
import torch
from peft.tuners.oft.layer import OFTRotationModule
from torch import Tensor

from llamafactory_ascend.features.oft import cayley
from llamafactory_ascend.features.oft.rotations import CayleyRotations, Rotate, Rotations


def draw(blocks: int, width: int, std: float, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(width)
    return torch.randn(blocks, width * (width - 1) // 2, dtype=dtype) * std


def of_peft(vectors: Tensor, terms: int = 0) -> Tensor:
    """PEFT's rotations: of the series with so many terms, exact for 0."""
    width = cayley.block_size(vectors.shape[1])
    module = OFTRotationModule(len(vectors), vectors.shape[1], width, len(vectors) * width)
    found: Tensor = module._cayley_batch(vectors, width, terms > 0, terms)
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.matrix_norm(found - expected).max() / expected.shape[-1] ** 0.5)


@pytest.mark.parametrize("width", [2, 3, 32, 64, 128])
@pytest.mark.parametrize("std", [0.0, 1e-3, 0.1, 0.4, 1.0, 5.0, 20.0])
def test_rotations_are_pefts_exact_ones_and_orthogonal(width: int, std: float) -> None:
    vectors = draw(3, width, std)
    found = cayley.cayley(vectors)
    assert found.dtype == torch.float32
    assert float(cayley.orthogonality_error(found).max()) < 1e-6
    assert relative(found, of_peft(vectors.double())) < 1e-6  # PEFT's own in float32: 1.4e-5


def test_the_largest_norm_that_is_promised() -> None:
    """All eigenvalues of one size: the case in which the bound is too large by the most."""
    vectors, width = draw(1, 128, 1.0, torch.float64), 128
    basis = torch.linalg.qr(cayley.skew(vectors)[0]).Q
    turn = torch.zeros(width, width, dtype=torch.float64)
    for i in range(0, width, 2):
        turn[i, i + 1], turn[i + 1, i] = 350.0, -350.0
    q = basis @ turn @ basis.mT
    rows, columns = torch.triu_indices(width, width, 1)
    found = cayley.cayley(q[rows, columns][None].float())
    assert float(cayley.orthogonality_error(found).max()) < 1e-6


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 7])
def test_the_series_is_pefts(terms: int) -> None:
    vectors = draw(2, 16, 0.1, torch.float64)
    assert torch.allclose(cayley.series(vectors, terms), of_peft(vectors, terms))


def test_the_series_is_no_rotation_and_the_transpose() -> None:
    vectors = draw(2, 32, 0.1)
    assert float(cayley.orthogonality_error(cayley.series(vectors, 5)).max()) > 0.1
    small = vectors / 100
    assert relative(cayley.series(small, 5), cayley.cayley(small).mT) < 1e-6
    assert relative(cayley.series(small, 5), cayley.cayley(small)) > 1e-2


def test_gradients_against_finite_differences() -> None:
    first, second = (draw(2, 5, std, torch.float64).requires_grad_() for std in (0.5, 3.0))
    x = torch.randn(2, 3, 10, dtype=torch.float64, requires_grad=True)

    def rotate(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        shared = Rotations([first, second])
        for part in CayleyRotations.apply(shared, torch.float64, first, second):
            x = Rotate.apply(x, part)
        return x

    assert torch.autograd.gradcheck(rotate, (x, first, second))


def test_pieces_of_a_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, grads = draw(7, 8, 0.3), torch.randn(7, 8, 8)
    whole = cayley.cayley(vectors)
    gradient = cayley.gradient(whole, grads)
    monkeypatch.setattr(cayley, "PIECE", 3 * 8 * 8)
    assert torch.equal(cayley.cayley(vectors), whole)
    assert torch.equal(cayley.gradient(whole, grads), gradient)


def test_float32_inside_whatever_is_given_and_autocast_says() -> None:
    vectors = draw(4, 32, 0.2)
    rounded = vectors.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cayley.cayley(rounded)
        gradient = cayley.gradient(found, torch.ones_like(found))
    assert torch.equal(found, cayley.cayley(rounded.float()))
    assert torch.equal(gradient, cayley.gradient(found, torch.ones_like(found)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layers_rotation_is_the_block_diagonal_product(dtype: torch.dtype) -> None:
    rotations = cayley.cayley(draw(3, 4, 0.5)).to(dtype)
    x = torch.randn(2, 12, 5, dtype=dtype).mT  # not contiguous
    found = Rotate.apply(x, rotations)
    assert torch.allclose(found, x @ torch.block_diag(*rotations), atol=1e-6 if dtype.itemsize == 4 else 3e-2)
