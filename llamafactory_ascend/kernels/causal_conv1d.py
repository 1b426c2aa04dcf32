"""Depthwise causal convolution as shifted multiply-adds, in the layout the projections leave: [B, T, C].

A kernel of 4 taps is 4 launches forward; no transposes, no padding, and packed samples cost a mask a tap.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamafactory_ascend.kernels.varlen import Sequences


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    sequences: Sequences | None = None,
) -> Tensor:
    """Compute activation(bias + sum over j of weight[:, width - 1 - j] * x at j tokens before).

    Args:
        x: [B, T, C]; with `sequences` B is 1.
        weight: [C, width].
        bias: [C] or None.
        activation: "silu", "swish" or None.
        sequences: packed samples; tokens before the start of a sample count as zero.

    Returns:
        [B, T, C] in the dtype of `x`.

    Raises:
        ValueError: another activation.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"causal_conv1d: the activation {activation!r} is not known, only silu and None are")
    index = None if sequences is None else sequences.index
    output: Tensor = _ShiftedSum.apply(x, weight.to(x.dtype), index)  # type: ignore[no-untyped-call]
    if bias is not None:
        output = output + bias.to(x.dtype)
    return F.silu(output) if activation else output


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Compute the same as Transformers does: through `conv1d` on [B, C, T], the surplus cut off."""
    output = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=weight.shape[0])
    output = output[..., : x.shape[-1]]
    return F.silu(output) if activation else output


class _ShiftedSum(torch.autograd.Function):
    """y_t = sum_j w[:, width - 1 - j] * x_{t - j}, the products added in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, index: Tensor | None) -> Tensor:
        last, tokens = weight.shape[1] - 1, x.shape[1]
        output = x * weight[:, last]
        for shift in range(1, min(last + 1, tokens)):
            earlier = x[:, : tokens - shift]
            output[:, shift:].addcmul_(_same_sample(earlier, index, shift), weight[:, last - shift])
        ctx.save_for_backward(x, weight, index)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, index = ctx.saved_tensors
        last, tokens = weight.shape[1] - 1, x.shape[1]
        shifts = range(1, min(last + 1, tokens))
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = d_output * weight[:, last]
            for shift in shifts:
                later = _same_sample(d_output[:, shift:], index, shift)
                d_x[:, : tokens - shift].addcmul_(later, weight[:, last - shift])
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight, dtype=torch.float32)
            d_weight[:, last] = (d_output * x).sum((0, 1), dtype=torch.float32)
            for shift in shifts:
                later = _same_sample(d_output[:, shift:], index, shift)
                d_weight[:, last - shift] = (later * x[:, : tokens - shift]).sum((0, 1), dtype=torch.float32)
            d_weight = d_weight.to(weight.dtype)
        return d_x, d_weight, None


def _same_sample(part: Tensor, index: Tensor | None, shift: int) -> Tensor:
    """Return `part` with zeros where the token `shift` places on begins less than `shift` tokens earlier."""
    return part if index is None else part * (index[:, shift:] >= shift)
