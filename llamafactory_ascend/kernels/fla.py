"""flash-linear-attention's Ascend kernels behind our calls; the first call imports the package."""

import importlib
from typing import Any

import torch
from torch import Tensor

from llamafactory_ascend.kernels import grids
from llamafactory_ascend.kernels.varlen import Sequences


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Call `fla.ops.gated_delta_rule.chunk_gated_delta_rule` on as many heads at once as a grid allows."""
    chunk_gated_delta_rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return in_head_ranges(
        chunk_gated_delta_rule, query, key, value, g, beta,
        initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def in_head_ranges(
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    limit: int = grids.LARGEST_GRID,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call a kernel of the rule for ranges of heads whose grids are within `limit`; heads are independent.

    Packed samples are padded to whole chunks each, which the plan counts in full.
    """
    batch, tokens, heads, width = value.shape
    group = heads // key.shape[2]
    padding = 0 if cu_seqlens is None else (len(cu_seqlens) - 1) * (grids.CHUNK - 1)
    ranges = grids.split_heads(batch, tokens + padding, heads, group, width, limit)
    parts = []
    for first, last in ranges:
        shared = slice(first // group, last // group)
        parts.append(
            function(
                query[:, :, shared], key[:, :, shared], value[:, :, first:last],
                g=g[:, :, first:last], beta=beta[:, :, first:last],
                initial_state=None if initial_state is None else initial_state[:, first:last],
                cu_seqlens=cu_seqlens, **options,
            )
        )  # fmt: skip
    if len(parts) == 1:
        output, state = parts[0]
        return output, state
    states = [state for _, state in parts if state is not None]
    return torch.cat([output for output, _ in parts], 2), torch.cat(states, 1) if states else None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    sequences: Sequences | None = None,
) -> Tensor:
    """Call `fla.modules.convolution.causal_conv1d`, which splits its grids itself."""
    convolve = importlib.import_module("fla.modules.convolution").causal_conv1d
    cu_seqlens = None if sequences is None else sequences.cu_seqlens
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    output: Tensor = convolve(x.contiguous(), weight, bias, activation=activation, cu_seqlens=cu_seqlens)[0]
    return output
