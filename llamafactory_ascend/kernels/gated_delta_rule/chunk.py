"""The algebra inside chunks and between them. Symbols as in docs/gated_delta_rule.md.

N is chunks * batch * heads, C the chunk size, K and V the widths of a key and a value head.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from llamafactory_ascend.kernels.gated_delta_rule.layout import Layout

NORM_EPSILON = 1e-6  # that of Transformers and flash-linear-attention


class Inputs(NamedTuple):
    """What the rule is given, padded to whole chunks: [B, T, H, D], [B, T, H] and [sequences, H, K, V]."""

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.value.shape[2] // self.key.shape[2]

    def heads(self, start: int, stop: int) -> "Inputs":
        """Return value heads start to stop with their key heads; both bounds are multiples of `group`."""
        keys = slice(start // self.group, stop // self.group)
        state = None if self.initial_state is None else self.initial_state[:, start:stop]
        return Inputs(
            self.query[:, :, keys],
            self.key[:, :, keys],
            self.value[:, :, start:stop],
            self.g[:, :, start:stop],
            self.beta[:, :, start:stop],
            state,
        )


class Options(NamedTuple):
    """How to compute: factor of the query, whether to normalise query and key, and the compute dtype."""

    scale: float
    normalize: bool
    dtype: torch.dtype


class Masks(NamedTuple):
    """Constants of one chunk size.

    Attributes:
        below: [C, C], 1 strictly below the diagonal.
        upper: [C, C], 1 on and above the diagonal: `upper @ x` sums x from each row on.
        not_below: [C, C] bool, on and above the diagonal.
        above: [C, C] bool, strictly above the diagonal.
        identity: [C, C].
        levels: for s = 1, 2, 4, ... the [C, C] mask of the lower left s-block of each diagonal 2s-block.
    """

    below: Tensor
    upper: Tensor
    not_below: Tensor
    above: Tensor
    identity: Tensor
    levels: tuple[Tensor, ...]


@lru_cache(maxsize=16)
def chunk_masks(chunk_size: int, device: torch.device, dtype: torch.dtype) -> Masks:
    """Return the masks, built once per process and device."""
    with torch.inference_mode(False):
        i = torch.arange(chunk_size)
        row, column = i[:, None], i[None, :]
        levels, size = [], 1
        while size < max(chunk_size, 2):
            pair = row // (2 * size) == column // (2 * size)
            levels.append(pair & (row // size % 2 == 1) & (column // size % 2 == 0))
            size *= 2
        below, upper, identity, *blocks = (
            mask.to(device, dtype) for mask in (row > column, row <= column, row == column, *levels)
        )
        not_below, above = ((row <= column).to(device), (row < column).to(device))
        return Masks(below, upper, not_below, above, identity, tuple(blocks))


def invert_unit_lower(lower: Tensor, masks: Masks) -> Tensor:
    """Return (I + L)^-1 [N, C, C], L being what `lower` holds strictly below the diagonal.

    Block recursion: with the diagonal s-blocks inverted, those of twice the size are inv - inv L_s inv. It
    never forms powers of L, which for near-identical keys reach 1e9 and cancel (as Neumann doubling does).
    """
    inverse = masks.identity - lower * masks.levels[0]
    for level in masks.levels[1:]:
        inverse = torch.baddbmm(inverse, inverse, torch.bmm(lower * level, inverse), alpha=-1)
    return inverse


class Decay(NamedTuple):
    """Products of exp(g) over the tokens of a chunk.

    Attributes:
        pairwise: Gamma [N, C, C], from after token j through token i; 0 above the diagonal.
        from_start: exp(gamma_i) [N, C, 1], from the chunk's start through token i.
        to_end: [N, C, 1], from after token j through the chunk's end.
    """

    pairwise: Tensor
    from_start: Tensor
    to_end: Tensor

    @property
    def total(self) -> Tensor:
        """Decay over the whole chunk [N, 1, 1]."""
        return self.from_start[:, -1:]


def chunk_decay(g: Tensor, masks: Masks) -> Decay:
    """Return the decays of g [N, C].

    Each exponent is a sum over just the tokens between j and i, not gamma_i - gamma_j: after one strongly
    decaying token that difference would have lost its digits, and with g = -inf it would be NaN.
    """
    size = g.shape[1]
    exponent = g.unsqueeze(2).expand(-1, -1, size).masked_fill(masks.not_below, 0)
    pairwise = exponent.cumsum_(1).masked_fill_(masks.above, float("-inf")).exp_()
    return Decay(pairwise, g.cumsum(1).exp_().unsqueeze(2), pairwise[:, -1].contiguous().unsqueeze(2))


def decay_gradient(d_pairwise: Tensor, d_from_start: Tensor, masks: Masks) -> Tensor:
    """Return the gradient [N, C] of g from those of the two exponents [N, C, C] and [N, C].

    g_t is in exponent (i, j) for i >= t > j. Sums of just these, again without differences.
    """
    within = torch.matmul(masks.upper, d_pairwise).mul_(masks.below).sum(2)
    return within.addmm_(d_from_start, masks.upper.t())


def transition(decayed_key: Tensor, w: Tensor, total: Tensor) -> Tensor:
    """Return what a chunk multiplies its incoming state by: M = total * I - decayed_key^T w  [N, K, K]."""
    matrix = torch.bmm(decayed_key.transpose(1, 2), w).neg_()
    matrix.diagonal(dim1=1, dim2=2).add_(total.squeeze(2))
    return matrix


def scan(targets: Iterable[Tensor], matrices: Iterable[Tensor], sources: Iterable[Tensor | None]) -> None:
    """Do target += matrix @ source chunk after chunk, the only sequential work; None stands for zero."""
    for target, matrix, source in zip(targets, matrices, sources, strict=True):
        if source is not None:
            target.baddbmm_(matrix, source)


def set_slots(states: Tensor, slots: Iterable[int], values: Tensor | None) -> None:
    """Write one state per sequence, or zero, into its slot of [chunks + 1, B * H, K, V]."""
    for number, slot in enumerate(slots):
        if values is None:
            states[slot].zero_()
        else:
            states[slot].copy_(values[number])


def load_normalized(
    x: Tensor, layout: Layout, options: Options, group: int, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Return query or key in chunk layout, normalised if asked and scaled, and its inverse norm [N, C, 1]."""
    chunks = layout.split(x, options.dtype, group)
    if not options.normalize:
        return (chunks.mul_(scale) if scale != 1 else chunks), None
    inverse_norm = chunks.square().sum(2, keepdim=True).add_(NORM_EPSILON).rsqrt_()
    return chunks.mul_(inverse_norm * scale if scale != 1 else inverse_norm), inverse_norm


def normalized_gradient(d_x: Tensor, x: Tensor, inverse_norm: Tensor | None, scale: float) -> Tensor:
    """Turn, in place, the gradient of what `load_normalized` returned (`x`) into that of its argument."""
    if inverse_norm is None:
        return d_x.mul_(scale) if scale != 1 else d_x
    along = (d_x * x).sum(2, keepdim=True)
    if scale != 1:
        d_x.mul_(scale)
    return d_x.addcmul_(x, along, value=-1 / scale).mul_(inverse_norm)
