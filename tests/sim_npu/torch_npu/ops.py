"""Reference versions of torch_npu's fused operators, keeping the tensors the real ones keep.

Each runs as one operator with a backward of its own, so that what is saved for backward, and with it the
memory of a training step, is the fused operator's and not that of its parts. What they need while they run is
neither charged to the device nor counted, because a fused kernel has it in its core's own memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from . import _sim

_library = torch.library.Library("npu", "DEF")


def register_operator(
    schema: str, forward: Callable[..., Any], backward: Callable[..., Any], setup: Callable[..., None]
) -> Any:
    """Define ``npu::<schema>`` with its backward; calls count as ``npu::name`` and ``npu::name_backward``.

    ``forward`` takes what the schema says, ``backward(ctx, saved, *gradients)`` the tensors that ``setup``
    has saved; both get and return CPU tensors.
    """
    name = schema.split("(")[0]

    def run(*args, **kwargs):
        return _on_cpu(f"npu::{name}", forward, *args, **kwargs)

    @once_differentiable  # nor have the real backward operators a derivative
    def run_backward(ctx, *gradients):
        run = functools.partial(backward, ctx)
        return _on_cpu(f"npu::{name}_backward", run, ctx.saved_tensors, *gradients)

    _library.define(schema)
    # for the device's key alone: CPU tensors are refused, as by the real operators
    _library.impl(name, run, "PrivateUse1")
    torch.library.register_autograd(f"npu::{name}", run_backward, setup_context=setup, lib=_library)
    return getattr(torch.ops.npu, name)


def _on_cpu(label: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as one operator: on CPU tensors over the bytes of device tensors."""
    torch.ops.simnpu.count(label)
    call = _sim.CpuCall()
    args, kwargs = tree_map_only(Tensor, call.enter, (args, kwargs))
    call.check_one_device(label)
    return tree_map_only(Tensor, call.leave, function(*args, **kwargs))


# ---- RMSNorm: y = x / rms(x) * gamma, with 1 / rms(x) kept in float32
def _rms_norm_forward(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    wide = x.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return ((wide * rstd) * gamma.float()).to(x.dtype), rstd


def _rms_norm_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _rms_norm_backward(ctx, saved: tuple[Tensor, ...], dy: Tensor, _):
    x, gamma, rstd = saved
    normed = x.float() * rstd
    wide = dy.float()
    g = wide * gamma.float()
    dx = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd
    dgamma = (wide * normed).reshape(-1, gamma.numel()).sum(0).reshape(gamma.shape)
    return dx.to(x.dtype), dgamma.to(gamma.dtype), None


npu_rms_norm = register_operator(
    "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    _rms_norm_forward,
    _rms_norm_backward,
    _rms_norm_setup,
)


# ---- SwiGLU: silu(first half) * second half
def _swiglu_forward(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def _swiglu_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.dim = inputs[1]


def _swiglu_backward(ctx, saved: tuple[Tensor, ...], dy: Tensor):
    gate, up = saved[0].float().chunk(2, ctx.dim)
    s = torch.sigmoid(gate)
    d = dy.float()
    return torch.cat([d * up * s * (1 + gate * (1 - s)), d * gate * s], ctx.dim).to(dy.dtype), None


npu_swiglu = register_operator(
    "npu_swiglu(Tensor self, int dim=-1) -> Tensor", _swiglu_forward, _swiglu_backward, _swiglu_setup
)


# ---- rotary position embedding: x * cos + rotate(x) * sin
def _rotate(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    if mode == "interleave":
        return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    raise RuntimeError(f"npu_rotary_mul: rotary_mode must be 'half' or 'interleave', not {mode!r}")


def _rotary_forward(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half") -> Tensor:
    return x * cos + _rotate(x, rotary_mode) * sin


def _rotary_setup(ctx, inputs, output) -> None:
    x, cos, sin, ctx.mode = inputs
    ctx.tables_need_grad = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    ctx.save_for_backward(x if ctx.tables_need_grad else None, cos, sin)


def _rotary_backward(ctx, saved: tuple[Tensor | None, ...], dy: Tensor):
    x, cos, sin = saved
    dx = dy * cos - _rotate(dy * sin, ctx.mode)
    if not ctx.tables_need_grad:
        return dx, None, None, None
    return dx, (dy * x).sum_to_size(cos.shape), (dy * _rotate(x, ctx.mode)).sum_to_size(sin.shape), None


npu_rotary_mul = register_operator(
    "npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor",
    _rotary_forward,
    _rotary_backward,
    _rotary_setup,
)


# ---- storage formats: the simulated device stores everything as ND
def npu_format_cast(x: Tensor, acl_format: int) -> Tensor:
    """``x`` itself: the fractal formats of the hardware are not modelled."""
    return x


def get_npu_format(x: Tensor) -> int:
    """2, which is ACL_FORMAT_ND."""
    return 2
