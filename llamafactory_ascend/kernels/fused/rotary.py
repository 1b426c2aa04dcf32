"""Rotary position embedding through `npu_rotary_mul`, whole heads or their first channels."""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first cos.shape[-1] channels of `x`, halves paired, and leave the others.

    Args:
        x: [B, heads, T, D] or [B, T, heads, D].
        cos, sin: 4-D, broadcast to `x`; at most D channels.

    Returns:
        Like `x`, in the wider dtype of `x` and the tables.
    """
    import torch_npu

    channels = cos.shape[-1]
    dtype = torch.promote_types(x.dtype, cos.dtype)
    x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
    if channels == x.shape[-1]:
        output: Tensor = torch_npu.npu_rotary_mul(x, cos, sin)
        return output
    turned = torch_npu.npu_rotary_mul(x[..., :channels].contiguous(), cos, sin)
    return torch.cat([turned, x[..., channels:]], -1)
