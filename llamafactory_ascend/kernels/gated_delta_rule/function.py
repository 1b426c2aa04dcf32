"""The public function and its place in autograd."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.kernels.gated_delta_rule import budget
from llamafactory_ascend.kernels.gated_delta_rule.backward import backward
from llamafactory_ascend.kernels.gated_delta_rule.chunk import Inputs, Options
from llamafactory_ascend.kernels.gated_delta_rule.forward import Saved, forward
from llamafactory_ascend.kernels.gated_delta_rule.layout import Layout, packed_once, rows

# Arguments of flash-linear-attention that change what is computed. Any other extra keyword (Transformers
# passes those of its attention functions) changes nothing here.
UNSUPPORTED = (
    "allow_neg_eigval",
    "cp_context",
    "head_first",
    "state_v_first",
    "transpose_state_layout",
    "use_beta_sigmoid_in_kernel",
    "use_gate_in_kernel",
)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    head_block: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule; takes the place of Transformers' `torch_chunk_gated_delta_rule`.

    Per token, with a state S [K, V] per value head and row (or packed sequence):
    `S = exp(g) S;  S = S + beta k (v - k^T S)^T;  output = scale * q^T S`.
    Source: Gated Delta Networks, arXiv 2412.06464; the chunked form is in docs/gated_delta_rule.md.

    Args:
        query: [B, T, key heads, K], any floating dtype, any strides.
        key: as `query`.
        value: [B, T, value heads, V]; each key head serves value heads / key heads consecutive value heads.
        g: [B, T, value heads], logarithm of the decay, at most 0; -inf forgets everything.
        beta: [B, T, value heads], how much of the new value is written.
        chunk_size: tokens worked on at once; changes rounding and cost, not the result.
        initial_state: [B, value heads, K, V], with `cu_seqlens` [sequences, value heads, K, V]; None is zero.
        output_final_state: whether to return the final state too.
        use_qk_l2norm_in_kernel: divide query and key by their norm (in the compute dtype) first.
        cu_seqlens: [sequences + 1] cumulative lengths of the sequences packed in one row; each starts anew.
        scale: factor of the query, 1 / sqrt(K) by default.
        head_block: value heads to work on at once, rounded up to whole groups; by default as many as
            `budget.DEFAULT_BUDGET` holds. Fewer means less memory and more launches, the same result.
        kwargs: what else callers of this interface pass; see `UNSUPPORTED`.

    Returns:
        The output [B, T, value heads, V] in the dtype of `query`, and the final state [B or sequences, value
        heads, K, V] in the compute dtype (float64 for a float64 query, else float32), or None.

    Raises:
        AscendError: the shapes do not fit, or an unsupported argument is set.
    """
    _check(query, key, value, g, beta, initial_state, cu_seqlens, chunk_size, head_block, kwargs)
    batch, tokens, value_heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    if cu_seqlens is None:
        layout = rows(batch, tokens, chunk_size)
    else:
        layout = packed_once(cu_seqlens, tokens, chunk_size, value.device)
    options = Options(
        scale=key_dim**-0.5 if scale is None else float(scale),
        normalize=bool(use_qk_l2norm_in_kernel),
        dtype=torch.float64 if query.dtype == torch.float64 else torch.float32,
    )
    group = value_heads // key_heads
    if head_block is None:
        per_head = budget.working_bytes_per_head(
            layout.chunks * layout.batch, chunk_size, key_dim, value_dim, options.dtype.itemsize
        )
        head_block = budget.choose_head_block(value_heads, group, per_head)
    head_block = min(value_heads, -(-head_block // group) * group)

    inputs = Inputs(query, key, value, g, beta, initial_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        output, final = _GatedDeltaRule.apply(*inputs, layout, options, head_block)  # type: ignore[no-untyped-call]
    else:
        output, final, _ = _forward(inputs, layout, options, head_block)
    return output, final if output_final_state else None


class _GatedDeltaRule(torch.autograd.Function):
    """Saves the inputs and one `Saved` per block of heads."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, layout, options, head_block = args
        output, final, saved = _forward(Inputs(*tensors), layout, options, head_block)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *(x for block in saved for x in block))
        ctx.settings = (layout, options, head_block)
        return output, final

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_output: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        layout, options, head_block = ctx.settings
        tensors = ctx.saved_tensors
        inputs, rest = Inputs(*tensors[:6]), tensors[6:]
        saved = [Saved(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)]
        if d_output is None:
            d_output = inputs.query.new_zeros(inputs.value.shape)
        with _no_autocast(d_output.device):
            padded, d_output = _pad(inputs, layout), layout.pad(d_output)
            *tokens, d_initial = backward(padded, saved, d_output, d_final, layout, options, head_block)
            state = inputs.initial_state
            d_state = None if state is None else d_initial.to(state.dtype)
            return *(layout.unpad(x) for x in tokens), d_state, None, None, None


def _forward(
    inputs: Inputs, layout: Layout, options: Options, head_block: int
) -> tuple[Tensor, Tensor, list[Saved]]:
    """Run `forward` on unpadded tensors, outside autograd and autocast."""
    with torch.no_grad(), _no_autocast(inputs.value.device):
        output, final, saved = forward(_pad(inputs, layout), layout, options, head_block)
        return layout.unpad(output), final, saved


def _pad(inputs: Inputs, layout: Layout) -> Inputs:
    query, key, value, g, beta = (layout.pad(x) for x in inputs[:5])
    return Inputs(query, key, value, g, beta, inputs.initial_state)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Keep the caller's autocast from turning the products into bfloat16 ones."""
    if torch.amp.autocast_mode.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    head_block: int | None,
    kwargs: dict[str, Any],
) -> None:
    """Raise AscendError for what the rule cannot compute."""
    where = "gated delta rule"
    asked = [name for name in UNSUPPORTED if kwargs.get(name)]
    if asked:
        raise AscendError(
            f"{where}: {', '.join(asked)} is not supported by the PyTorch kernel",
            hint="leave it out, or use flash-linear-attention's kernel",
        )
    for name, count in (("chunk_size", chunk_size), ("head_block", head_block)):
        if count is not None and count < 1:
            raise AscendError(f"{where}: {name} is {count}", hint="use a positive number, or leave it out")
    if query.shape != key.shape or key.dim() != 4 or value.dim() != 4 or key.shape[:2] != value.shape[:2]:
        raise AscendError(
            f"{where}: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} differ",
            hint="pass query and key as [B, T, key heads, K] and value as [B, T, value heads, V]",
        )
    if g.shape != value.shape[:3] or beta.shape != value.shape[:3]:
        raise AscendError(
            f"{where}: g {list(g.shape)} and beta {list(beta.shape)} do not fit value {list(value.shape)}",
            hint=f"pass both as {list(value.shape[:3])} = [B, T, value heads]",
        )
    if 0 in value.shape or 0 in key.shape:
        raise AscendError(
            f"{where}: key {list(key.shape)} or value {list(value.shape)} is empty",
            hint="leave the layer out for a batch without tokens",
        )
    if value.shape[2] % key.shape[2]:
        raise AscendError(
            f"{where}: {value.shape[2]} value heads cannot share {key.shape[2]} key heads",
            hint="the number of value heads must be a multiple of the number of key heads",
        )
    if cu_seqlens is not None and value.shape[0] != 1:
        raise AscendError(
            f"{where}: cu_seqlens with a batch of {value.shape[0]} rows",
            hint="pack the sequences into one row: [1, total tokens, heads, width]",
        )
    sequences = value.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    expected = [sequences, value.shape[2], key.shape[3], value.shape[3]]
    if initial_state is not None and list(initial_state.shape) != expected:
        raise AscendError(
            f"{where}: initial_state is {list(initial_state.shape)} where {expected} is needed",
            hint="pass one state [value heads, K, V] per row, or per packed sequence",
        )
