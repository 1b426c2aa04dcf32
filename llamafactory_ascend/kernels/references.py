"""The operators as formulas in float64, differentiated by autograd: what kernels are held against.

Every function takes and returns float64 tensors; shapes as in ``operators.OPERATORS``.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SEGMENT = 64  # tokens whose states are alive at once in backward; the others are computed again
L2_EPSILON = 1e-6  # that of Transformers and flash-linear-attention
Starts = Sequence[int]


def _by_sample(bounds: Starts | None, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a function to the samples of a row, cut at `bounds` (cumulative lengths); None: to whole rows."""
    if bounds is None:
        return function(*tensors)
    parts = [function(*(x[:, start:end] for x in tensors)) for start, end in pairwise(bounds)]
    return torch.cat(parts, 1)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, bounds: Starts | None = None
) -> Tensor:
    """Compute the rule token by token with normalised query and key (arXiv 2412.06464)."""
    group, width = value.shape[2] // key.shape[2], key.shape[3]
    query, key = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)).repeat_interleave(group, 2)
        for x in (query, key)
    )
    return _by_sample(bounds, _scan, query * width**-0.5, key, value, g.exp(), beta)


def _scan(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    state = value.new_zeros(value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    outputs = []
    for start in range(0, query.shape[1], SEGMENT):
        part = (x[:, start : start + SEGMENT] for x in (query, key, value, decay, beta))
        output, state = checkpoint(_segment, state, *part, use_reentrant=False, preserve_rng_state=False)
        outputs.append(output)
    return torch.cat(outputs, 1)


def _segment(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for q, k, v, a, b in zip(*(x.unbind(1) for x in (query, key, value, decay, beta)), strict=True):
        state = state * a[..., None, None]
        written = b[..., None] * (v - (k.unsqueeze(-2) @ state).squeeze(-2))
        state = state + k.unsqueeze(-1) * written.unsqueeze(-2)
        outputs.append((q.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, 1), state


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, bounds: Starts | None = None
) -> Tensor:
    """Compute silu(bias + the sum over taps) for x [B, T, C] and weight [C, width]."""

    def convolve(part: Tensor) -> Tensor:
        padded = F.pad(part, (0, 0, weight.shape[1] - 1, 0))
        shifted = (padded[:, tap : tap + part.shape[1]] for tap in range(weight.shape[1]))
        total = torch.stack([x * w for x, w in zip(shifted, weight.unbind(1), strict=True)]).sum(0)
        return total if bias is None else total + bias

    return F.silu(_by_sample(bounds, convolve, x))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rms_norm_1p(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, 1 + weight, eps)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps) * F.silu(gate)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of x [B, heads, T, D], halves paired; tables [B, 1, T, channels]."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, kept], -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
