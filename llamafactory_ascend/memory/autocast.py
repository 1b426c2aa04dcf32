"""Autocast as it is on an NPU, for tensors that PyTorch takes for a CPU's.

A CPU's autocast lowers what an NPU's lowers, and leaves alone most of what an NPU's raises to float32. Both
follow PyTorch's own lists (ATen/autocast_mode.h: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import _scoped_library
from torch.utils._pytree import tree_map

KEY = "AutocastCPU"
RAISED = (
    "acos", "asin", "cosh", "exp", "expm1", "log", "log10", "log2", "log1p", "logsumexp", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "group_norm", "cosine_similarity", "kl_div", "l1_loss", "dist", "renorm",
)  # fmt: skip
SUMMED = (
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "sum",
    "sum.dim_IntList",
)


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Compute in a dtype as `autocast("npu")` would; None: as the tensors are."""
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        yield


@contextmanager
def as_on_an_npu() -> Iterator[None]:
    """Complete the CPU's list of operators that autocast raises to float32."""
    with _scoped_library("aten", "IMPL") as library:
        for names, make in ((RAISED, _raised), (SUMMED, _summed)):
            for name in names:
                packet, _, overload = name.partition(".")
                operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
                if not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.AutocastCPU):
                    library.impl(name, make(operator), KEY)
        yield


@contextmanager
def outside() -> Iterator[None]:
    """Leave the autocast that is on, as backward does, which begins after it has ended."""
    torch.clear_autocast_cache()
    torch.autocast_decrement_nesting()
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.autocast_increment_nesting()


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _below() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _raised(operator: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _below():
            args, kwargs = tree_map(lambda x: x.float() if _is_low(x) else x, (args, kwargs))
            return operator(*args, **kwargs)

    return call


def _summed(operator: Any) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        with _below():
            wanted = torch.float32 if dtype is None and tensor.is_floating_point() else dtype
            return operator(tensor, *args, dtype=wanted, **kwargs)

    return call
