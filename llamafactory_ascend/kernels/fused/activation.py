"""SwiGLU through `npu_swiglu`, which takes gate and up side by side."""

import torch
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up; `up` is cast to the dtype of `gate`."""
    import torch_npu

    output: Tensor = torch_npu.npu_swiglu(torch.cat([gate, up.to(gate.dtype)], -1), dim=-1)
    return output
