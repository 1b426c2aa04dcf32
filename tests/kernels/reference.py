"""The gated delta rule token by token in float64, by autograd: what every kernel is compared with.

Not fast and not clever on purpose: a few lines per token, straight from arXiv 2412.06464.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Case(NamedTuple):
    """Inputs of the rule and the gradient of its output, in float32."""

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    d_output: Tensor


def make_case(
    kind: str = "model",
    batch: int = 2,
    tokens: int = 200,
    key_heads: int = 3,
    value_heads: int = 3,
    key_dim: int = 64,
    value_dim: int = 32,
    seed: int = 0,
) -> Case:
    """Return random inputs.

    `kind`: `model` decays as Qwen3.5 initialises it, `moderate` by some 0.45 a token, `slow` almost not at
    all, `strong` by e^-30 and more a token, `same_key` has near-identical keys, hardly any decay and beta
    0.999.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query, key = randn(batch, tokens, key_heads, key_dim), randn(batch, tokens, key_heads, key_dim)
    value, d_output = (
        randn(batch, tokens, value_heads, value_dim),
        randn(batch, tokens, value_heads, value_dim),
    )
    gate, uniform = (
        randn(batch, tokens, value_heads),
        torch.rand(batch, tokens, value_heads, generator=generator),
    )
    rate = 16 * torch.rand(value_heads, generator=generator)
    g, beta = -rate * F.softplus(gate + 1), uniform
    if kind == "moderate":
        g = F.logsigmoid(gate)
    elif kind == "slow":
        g, beta = -0.001 * uniform, torch.sigmoid(gate + 3)
    elif kind == "strong":
        g = -30 - 100 * uniform
    elif kind == "same_key":
        key = randn(1, 1, key_heads, key_dim) + 1e-3 * key
        g, beta = -1e-4 * uniform, torch.full_like(uniform, 0.999)
    elif kind != "model":
        raise ValueError(kind)
    return Case(query, key, value, g, beta, d_output)


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    normalize: bool = True,
    cu_seqlens: list[int] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and final state in float64; layouts and meaning as in `chunk_gated_delta_rule`."""
    query, key, value, g, beta = (x.double() for x in (query, key, value, g, beta))
    if normalize:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    group = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(group, 2) for x in (query, key))
    shape = (value.shape[2], key.shape[3], value.shape[3])

    if cu_seqlens is not None:
        pairs = list(pairwise(cu_seqlens))
        parts = [tuple(x[:, start:stop] for x in (query, key, value, g, beta)) for start, stop in pairs]
        states = [None if initial_state is None else initial_state[n : n + 1] for n in range(len(pairs))]
    else:
        parts, states = [(query, key, value, g, beta)], [initial_state]

    outputs, finals = [], []
    for (q, k, v, gate, b), start in zip(parts, states, strict=True):
        state = value.new_zeros(value.shape[0], *shape) if start is None else start.double()
        for t in range(q.shape[1]):
            state = state * gate[:, t].exp()[..., None, None]
            written = b[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        finals.append(state)
    return torch.stack(outputs, 1), torch.cat(finals)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative L2 distance; infinite for NaN, which Python's `max` would hide."""
    difference, norm = (actual.double() - expected.double()).norm(), expected.double().norm()
    return (difference / norm.clamp_min(1e-300)).nan_to_num(nan=torch.inf).item()
