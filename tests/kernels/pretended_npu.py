"""Makes Triton and torch say that there is an Atlas A2; flash-linear-attention then takes its Ascend kernels.

Tensors stay on the CPU. Nothing is simulated: kernels are run by Triton's interpreter, or are compiled only.
"""

import contextlib
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("npu", "Ascend910B3", 0)
CORES = {"num_aicore": 24, "num_vectorcore": 48}
UNIFIED_BUFFER = (
    192 * 1024
)  # bytes of a vector core; without CANN, flash-linear-attention would assume a third


class Driver:
    """What is asked of Triton's active driver outside of a launch."""

    utils = types.SimpleNamespace(
        get_device_properties=lambda place: {**CORES, "max_shared_mem": UNIFIED_BUFFER, "mem_size": 0}
    )

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return what autotuners keep; with one configuration each they must not call it."""

        def measure(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("an autotuner measures: a kernel has more than one configuration")

        return measure


class Device(contextlib.nullcontext[None]):
    """`torch.npu.device(index)`."""

    def __init__(self, index: int) -> None:
        super().__init__()


def pretend() -> None:
    """Do it; to be called before `fla` is imported, in a process that does nothing else."""
    os.environ["ASCEND_UB_CAPACITY_BITS"] = str(8 * UNIFIED_BUFFER)
    triton.runtime.driver.set_active(Driver())
    torch.utils.rename_privateuse1_backend("npu")
    module: Any = types.ModuleType("torch.npu")
    module.device = Device
    module.is_available = module.is_initialized = lambda: True
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.get_device_name = lambda index=0: TARGET.arch
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module("npu", module)


def take_cpu_tensors() -> None:
    """Undo the one refusal that is about where a tensor lies; every other condition of the kernels stays."""
    from fla.ops.gated_delta_rule.backends.triton_ascend import TritonAscendGDNBackend

    TritonAscendGDNBackend.recompute_w_u_fwd_verifier = lambda self, *args, **kwargs: (True, None)
