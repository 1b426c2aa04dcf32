"""RMSNorm in the three conventions of the Qwen families, through `npu_rms_norm`.

The operator wants input and weight in one dtype and computes in float32 inside.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight over the last dimension, in the dtype that Transformers' code gives."""
    import torch_npu

    if x.dtype == weight.dtype:
        output: Tensor = torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]
        return output
    dtype = torch.promote_types(x.dtype, weight.dtype)
    wide: Tensor = torch_npu.npu_rms_norm(x.float(), weight.float(), epsilon=eps)[0]
    return wide.to(dtype)


def rms_norm_1p(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * (1 + weight), in float32: a sum near 1 keeps 8 bits only in bfloat16."""
    import torch_npu

    output: Tensor = torch_npu.npu_rms_norm(x.float(), 1.0 + weight.float(), epsilon=eps)[0]
    return output.to(x.dtype)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight * silu(gate), the last product in float32, in the dtype of `x`."""
    return (rms_norm(x, weight, eps) * F.silu(gate.float())).to(x.dtype)
