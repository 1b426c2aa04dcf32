"""What stands in for torch_npu's fused operators while memory is measured: they keep what those keep.

Shapes and dtypes are those of the published operators; nothing is computed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamafactory_ascend.kernels import backends
from llamafactory_ascend.kernels.backends import Backend


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        rstd = x.new_empty((*x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim()), dtype=torch.float32)
        ctx.save_for_backward(x, gamma, rstd)
        ctx.mark_non_differentiable(rstd)
        return torch.empty_like(x), rstd

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        x, gamma, _rstd = ctx.saved_tensors
        d_gamma = torch.empty_like(gamma, dtype=torch.float32)  # the operator sums it in float32
        return torch.empty_like(x), d_gamma.to(gamma.dtype), None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(x)
        shape = list(x.shape)
        shape[dim] //= 2
        return x.new_empty(shape)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return torch.empty_like(ctx.saved_tensors[0]), None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.x = x if ctx.needs_input_grad[1] or ctx.needs_input_grad[2] else None
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tables = [torch.empty_like(x) if ctx.x is not None else None for x in ctx.saved_tensors]
        return (torch.empty_like(grad), *tables)


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Any:
    return _RmsNorm.apply(x, gamma, epsilon)  # type: ignore[no-untyped-call]


def _swiglu(x: Tensor, dim: int = -1) -> Any:
    return _SwiGlu.apply(x, dim)  # type: ignore[no-untyped-call]


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half") -> Any:
    return _Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call]


OPERATORS = {"npu_rms_norm": _rms_norm, "npu_swiglu": _swiglu, "npu_rotary_mul": _rotary}


@contextmanager
def in_place_of_torch_npu() -> Iterator[None]:
    """Give the plugin's fused kernels, which import torch_npu when they are called, these operators."""
    real = sys.modules.get("torch_npu")
    stand_in = ModuleType("torch_npu")
    vars(stand_in).update(OPERATORS)
    sys.modules["torch_npu"] = stand_in
    try:
        yield
    finally:
        if real is None:
            del sys.modules["torch_npu"]
        else:
            sys.modules["torch_npu"] = real


def measurable() -> list[Backend]:
    """Return the plugin's back ends that can be measured, as if they were usable here.

    Those in Triton cannot: where an NPU would use one, the plugin's own in PyTorch is measured in its place.
    """
    return [replace(one, devices=(), requires=(), order=0) for one in backends.BUILT_IN if one.name != "fla"]
