"""Reference version of ``npu_fusion_attention``, on the CPU's flash kernel.

Neither forward nor backward holds a matrix of scores, so none is charged to the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .ops import register_operator

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# ---- layouts: B batch, N heads, S sequence, D width of a head, H = N * D, T all sequences in a row
def _to_bnsd(t: Tensor, heads: int, layout: str) -> Tensor:
    if layout == "BNSD":
        return t
    if layout == "BSND":
        return t.transpose(1, 2)
    if layout == "BSH":
        return t.unflatten(-1, (heads, -1)).transpose(1, 2)
    if layout == "SBH":
        return t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    raise RuntimeError(f"npu_fusion_attention: unknown input_layout {layout!r}: BNSD, BSND, BSH, SBH or TND")


def _from_bnsd(t: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return t
    t = t.transpose(1, 2)
    if layout == "BSND":
        return t.contiguous()
    t = t.flatten(2)
    return t if layout == "BSH" else t.transpose(0, 1).contiguous()


def _tnd_to_bnsd(t: Tensor) -> Tensor:
    return t.transpose(0, 1).unsqueeze(0)


def _bnsd_to_tnd(t: Tensor) -> Tensor:
    return t.squeeze(0).transpose(0, 1)


def _each_attention(
    layout: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_heads: int,
    q_ends: Sequence[int] | None,
    k_ends: Sequence[int] | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The (q, k, v) of each independent attention as BNSD: one, or one a sequence for TND.

    ``q_ends`` and ``k_ends`` are cumulative lengths without the leading zero.
    """
    if layout != "TND":
        k_heads = q_heads * k.shape[-1] // q.shape[-1] if layout in ("BSH", "SBH") else 0
        yield _to_bnsd(q, q_heads, layout), _to_bnsd(k, k_heads, layout), _to_bnsd(v, k_heads, layout)
        return
    if q_ends is None or k_ends is None:
        raise RuntimeError("npu_fusion_attention: layout TND needs actual_seq_qlen and actual_seq_kvlen")
    q_start = k_start = 0
    for q_end, k_end in zip(q_ends, k_ends, strict=True):
        yield (
            _tnd_to_bnsd(q[q_start:q_end]),
            _tnd_to_bnsd(k[k_start:k_end]),
            _tnd_to_bnsd(v[k_start:k_end]),
        )
        q_start, k_start = q_end, k_end


def _repeat_heads(t: Tensor, heads: int) -> Tensor:
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _additive_mask(
    atten_mask: Tensor | None, sparse_mode: int, q: Tensor, k: Tensor
) -> tuple[Tensor | None, bool]:
    """(mask to add to the scores or None, whether attention is causal) for one attention."""
    if sparse_mode not in (0, 2, 3):
        raise RuntimeError(f"npu_fusion_attention: sparse_mode 0, 2, 3 are simulated, not {sparse_mode}")
    if sparse_mode in (2, 3):  # causal, aligned to the left (2) or right (3) end of the keys
        if atten_mask is None or atten_mask.shape[-2:] != (2048, 2048):
            raise RuntimeError("npu_fusion_attention: sparse_mode 2 and 3 need the 2048 x 2048 atten_mask")
        queries, keys = q.shape[2], k.shape[2]
        if queries == keys or sparse_mode == 2:
            return None, True
        atten_mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1 + keys - queries)
    if atten_mask is None:
        return None, False
    if atten_mask.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"npu_fusion_attention: atten_mask must be bool or uint8, not {atten_mask.dtype}")
    zeros = torch.zeros(atten_mask.shape, dtype=q.dtype, device=q.device)
    return zeros.masked_fill_(atten_mask.bool(), torch.finfo(q.dtype).min), False


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    if keep_prob < 1.0 or pse is not None or prefix is not None:
        raise RuntimeError("npu_fusion_attention: the simulator computes no dropout, pse and prefix")
    packed = input_layout == "TND"
    outputs, log_sums = [], []
    for q, k, v in _each_attention(
        input_layout, query, key, value, head_num, actual_seq_qlen, actual_seq_kvlen
    ):
        mask, causal = _additive_mask(atten_mask, sparse_mode, q, k)
        heads = q.shape[1]
        output, log_sum = _flash(
            q, _repeat_heads(k, heads), _repeat_heads(v, heads), 0.0, causal, attn_mask=mask, scale=scale
        )
        outputs.append(_bnsd_to_tnd(output) if packed else _from_bnsd(output, input_layout))
        log_sums.append(_bnsd_to_tnd(log_sum) if packed else log_sum)
    result = (torch.cat(outputs) if packed else outputs[0]).contiguous()
    log_sum = torch.cat(log_sums) if packed else log_sums[0]
    # the hardware keeps 8 equal floats a row, of the maximum and of the sum; here the
    # first holds log(sum(exp(scores))), which is all the backward needs
    softmax_max = log_sum.unsqueeze(-1).expand(*log_sum.shape, 8).contiguous()
    return result, softmax_max, torch.ones_like(softmax_max), query.new_empty(0), 0, 0, 0


def _setup(ctx, inputs, output) -> None:
    query, key, value, ctx.heads, ctx.layout, _, _, mask, ctx.scale = inputs[:9]
    ctx.q_ends, ctx.k_ends, ctx.sparse_mode = inputs[14:17]
    ctx.save_for_backward(query, key, value, mask, output[0], output[1], output[2])


def _backward(ctx, saved: tuple[Tensor | None, ...], grad: Tensor, *_):
    query, key, value, atten_mask, output, softmax_max, _ = saved
    packed = ctx.layout == "TND"

    def attentions(queries: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return _each_attention(ctx.layout, queries, key, value, ctx.heads, ctx.q_ends, ctx.k_ends)

    log_sums = softmax_max[..., 0]
    grads: tuple[list[Tensor], ...] = ([], [], [])
    start = 0
    for (q, k, v), (out, _, _), (dout, _, _) in zip(
        attentions(query), attentions(output), attentions(grad), strict=True
    ):
        heads, length, kv_heads = q.shape[1], q.shape[2], k.shape[1]
        mask, causal = _additive_mask(atten_mask, ctx.sparse_mode, q, k)
        log_sum = _tnd_to_bnsd(log_sums[start : start + length]) if packed else log_sums
        start += length
        dq, dk, dv = _flash_backward(
            dout.contiguous(),
            q,
            _repeat_heads(k, heads),
            _repeat_heads(v, heads),
            out,
            log_sum.contiguous(),
            0.0,
            causal,
            attn_mask=mask,
            scale=ctx.scale,
        )
        if kv_heads != heads:
            dk, dv = (t.unflatten(1, (kv_heads, -1)).sum(2) for t in (dk, dv))
        for collected, part in zip(grads, (dq, dk, dv), strict=True):
            collected.append(_bnsd_to_tnd(part) if packed else _from_bnsd(part, ctx.layout))
    dq, dk, dv = (torch.cat(parts) if packed else parts[0] for parts in grads)
    return (dq, dk, dv) + (None,) * 14


npu_fusion_attention = register_operator(
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., "
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, "
    "int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    _forward,
    _backward,
    _setup,
)
