"""The Cayley rotation R = (I - Q) (I + Q)^-1 of skew-symmetric Q, in matrix products only.

PEFT's five-term series is not orthogonal (relative error 0.44 for entries of size 0.1 at block 32), and its
exact option solves linear systems, for which an NPU has no good operator. This is the convention of the exact
option, ``OFTConfig(use_cayley_neumann=False)``; the series approximates its transpose. A Q is given as PEFT
stores it: the upper triangle, row by row, [blocks, b (b - 1) / 2].

The inverse X of A = I + Q comes from Newton's iteration X <- X (2I - A X) (Newton-Schulz), started at A^T
over a bound of |A|^2, and R = 2 X - I. On A itself its rounding error is that of cond(A); on S = I - Q^2 =
A^T A it would be that of cond(A)^2. The eigenvalues of A X lie in [1 / WIDEST, 1] at first; each step is
scaled so that they lie around 1 again, which gains a factor of 4 a step where the plain iteration gains 2.
The factors follow from WIDEST alone: no step looks at a value, so nothing waits for the device. One step of
the iteration for the polar factor at the end makes R orthogonal to rounding.
"""

import functools
import math

import torch
from torch import Tensor

# The largest bound of 1 + |Q|^2 that is provided for, with 14 steps; 3e6 takes no more, but leaves no step to
# correct what the others have rounded. The bound is at most sqrt(b / 2) times too large, so every Q of a
# spectral norm up to 350 is safe at block 128; independent entries get there with a standard deviation of 25.
# Beyond it R is off, or a rotation by other angles, and the report of the run says so.
WIDEST = 1e6
PIECE = 2**24  # elements of a matrix batch: five such buffers, 320 MiB in float32, are alive at once


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return what rotations are computed in: float32, or float64 where that is given."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_size(elements: int) -> int:
    """Return the width b of a block whose upper triangle has ``elements`` = b (b - 1) / 2 elements."""
    return (1 + math.isqrt(1 + 8 * elements)) // 2


def skew(vectors: Tensor) -> Tensor:
    """Return the skew-symmetric matrices [blocks, b, b] of upper triangles [blocks, b (b - 1) / 2]."""
    width = block_size(vectors.shape[-1])
    source, sign, _ = _places(width, vectors.device, vectors.dtype)
    return vectors.index_select(1, source).view(-1, width, width) * sign


def cayley(vectors: Tensor) -> Tensor:
    """Return the rotations [blocks, b, b] of upper triangles [blocks, b (b - 1) / 2], in ``wide`` precision.

    Not differentiable; see `CayleyRotations`.
    """
    width = block_size(vectors.shape[-1])
    with torch.no_grad(), torch.autocast(vectors.device.type, enabled=False):
        pieces = torch.split(vectors, max(1, PIECE // width**2))
        if len(pieces) == 1:
            return _cayley(vectors)
        found = vectors.new_empty(len(vectors), width, width, dtype=wide(vectors.dtype))
        for part, piece in zip(torch.split(found, len(pieces[0])), pieces, strict=True):
            part.copy_(_cayley(piece))
        return found


def _bound(q: Tensor) -> Tensor:
    """Return a bound of 1 + |Q|^2 for each block, [blocks]."""
    square = q @ q
    # Eigenvalues of Q come in pairs, so |Q|^4 <= |Q^2|_F^2 / 2; and no norm is below the spectral one.
    frobenius = square.flatten(1).norm(dim=1) / math.sqrt(2)
    return 1 + torch.minimum(frobenius, square.abs().sum(2).amax(1))


def too_wide(vectors: Tensor) -> Tensor:
    """True for each block whose Q is beyond WIDEST; `cayley` may give it another rotation, [blocks]."""
    return ~(_bound(skew(vectors.to(wide(vectors.dtype)))) <= WIDEST)


def _cayley(vectors: Tensor) -> Tensor:
    q = skew(vectors.to(wide(vectors.dtype)))
    width = q.shape[-1]
    unit = torch.eye(width, dtype=q.dtype, device=q.device)
    first, factors = _schedule(q.dtype)
    inverse = (unit - q) * (first / _bound(q)).view(-1, 1, 1)
    product = unit + q
    for factor in factors:
        inverse = torch.baddbmm(inverse, inverse, product @ inverse, beta=2 * factor, alpha=-factor)
    rotation = 2 * inverse - unit
    return torch.baddbmm(rotation, rotation, rotation.mT @ rotation, beta=1.5, alpha=-0.5)


def gradient(rotations: Tensor, grads: Tensor) -> Tensor:
    """Return the gradient [blocks, b (b - 1) / 2] of the upper triangles, from that of the rotations.

    dR = -(I + R) dQ (I + R) / 2, so the gradient of Q is -(I + R)^T G (I + R)^T / 2.

    Args:
        rotations: [blocks, b, b], as `cayley` returns them.
        grads: the same shape and dtype.
    """
    blocks, width = rotations.shape[:2]
    _, _, upper = _places(width, rotations.device, rotations.dtype)
    found = rotations.new_empty(blocks, len(upper))
    step = max(1, PIECE // width**2)
    with torch.autocast(rotations.device.type, enabled=False):
        for out, r, g in zip(*(torch.split(whole, step) for whole in (found, rotations, grads)), strict=True):
            left = torch.baddbmm(g, r.mT, g)
            both = torch.baddbmm(left, left, r.mT)
            halved = (both.mT - both).mul_(0.5)
            torch.index_select(halved.reshape(-1, width**2), 1, upper, out=out)
    return found


def series(vectors: Tensor, terms: int) -> Tensor:
    """Return what PEFT's Cayley-Neumann series makes of the same triangles: I + 2Q + 2Q^2 + ... + Q^4.

    Only to say how far from a rotation it is; [blocks, b, b] in ``wide`` precision.
    """
    q = skew(vectors.to(wide(vectors.dtype)))
    total = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device).expand_as(q).clone()
    power, last = q, max(terms - 1, 3)  # PEFT makes four terms of three
    for exponent in range(1, last + 1 if terms > 2 else terms):
        total += power if exponent == last else 2 * power
        power = power @ q
    return total


def orthogonality_error(rotations: Tensor) -> Tensor:
    """Return |R R^T - I|_F / sqrt(b) for each block, [blocks]."""
    width = rotations.shape[-1]
    unit = torch.eye(width, dtype=rotations.dtype, device=rotations.device)
    errors: Tensor = torch.linalg.matrix_norm(rotations @ rotations.mT - unit)
    return errors / math.sqrt(width)


@functools.cache
def _schedule(dtype: torch.dtype) -> tuple[float, tuple[float, ...]]:
    """Return the factor of the first iterate and those of all steps, 14 in float32.

    After a step, |1 - eigenvalue of A X| <= radius; the next one squares it, onto [1 - radius^2, 1].
    """
    smallest = 1 / WIDEST
    first, radius, factors = 2 / (1 + smallest), (1 - smallest) / (1 + smallest), []
    while radius > torch.finfo(dtype).eps:
        factors.append(2 / (2 - radius**2))
        radius = radius**2 / (2 - radius**2)
    return first, tuple(factors)


@functools.lru_cache(maxsize=16)
def _places(width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each entry of a block stands in the triangle, its sign, and where the triangle stands."""
    with torch.inference_mode(False):  # what is made inside cannot be used by autograd later
        rows, columns = torch.triu_indices(width, width, 1)
        source = torch.zeros(width, width, dtype=torch.long)
        source[rows, columns] = source[columns, rows] = torch.arange(len(rows))
        sign = torch.ones(width, width).triu(1) - torch.ones(width, width).tril(-1)
        return source.view(-1).to(device), sign.to(device, dtype), (rows * width + columns).to(device)
