"""The ``torch.npu`` module of the simulated device: devices, and what the other files hold."""

from __future__ import annotations

import os
import types
from typing import Any

import torch

import torch_npu

# ---- initialisation: torch calls _lazy_init at the first use of the device, set_device does too.
# torch.utils.checkpoint reads _initialized: if it is not set, dropout draws anew in recomputation
_initialized = False
_in_bad_fork = False


def _after_fork_in_child() -> None:
    global _in_bad_fork, _initialized
    _in_bad_fork = _in_bad_fork or _initialized
    _initialized = False


os.register_at_fork(after_in_child=_after_fork_in_child)


def _is_in_bad_fork() -> bool:
    return _in_bad_fork


def _lazy_init() -> None:
    global _initialized
    if _in_bad_fork:
        raise RuntimeError(
            "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, "
            "you must use the 'spawn' start method"
        )
    _initialized = True


def init() -> None:
    _lazy_init()


def is_initialized() -> bool:
    return _initialized


# ---- devices
def device_count() -> int:
    return torch_npu._sim.device_count()


def is_available() -> bool:
    return device_count() > 0


def current_device() -> int:
    return torch._C._accelerator_getDeviceIndex()


def _get_device_index(device: Any = None) -> int:
    """The index of an int, str or torch.device; the current device for None, ``npu`` and negatives."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return current_device() if device < 0 else device
    device = torch.device(device)
    if device.type != "npu":
        raise ValueError(f"Expected a npu device, but got: {device}")
    return current_device() if device.index is None else device.index


def set_device(device: Any) -> None:
    _lazy_init()
    torch._C._accelerator_setDeviceIndex(_get_device_index(device))


def get_device_name(device: Any = None) -> str:
    return os.environ.get("SIM_NPU_NAME", "Ascend910B3")


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    """Memory as configured; the core counts are an Ascend 910B3's."""
    return types.SimpleNamespace(
        name=get_device_name(),
        total_memory=mem_get_info(device)[1],
        cube_core_num=20,
        vector_core_num=40,
        multi_processor_count=20,
        L2_cache_size=192 << 20,
        major=0,
        minor=0,
    )


def get_device_capability(device: Any = None) -> None:
    """None, as torch_npu: compute capabilities are CUDA's."""


def can_device_access_peer(device: Any, peer: Any) -> bool:
    return True


class device:
    """Context manager that makes a device the current one."""

    def __init__(self, device: Any) -> None:
        self.idx = _get_device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(self, *exception: object) -> None:
        set_device(self.prev_idx)


class device_of(device):
    """Context manager that makes a tensor's device the current one; nothing for a CPU tensor."""

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.get_device() if obj.device.type == "npu" else -1)


def synchronize(device: Any = None) -> None:
    torch._C._accelerator_synchronizeDevice(_get_device_index(device))


def ipc_collect() -> None:
    """Nothing: memory is not shared between processes."""


# ---- mixed precision and options
def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("npu")


def set_autocast_enabled(enable: bool) -> None:
    torch.set_autocast_enabled("npu", enable)


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("npu")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("npu", dtype)


_options: dict[str, Any] = {}


def set_option(option: dict[str, Any]) -> None:
    _options.update(option)


def set_compile_mode(jit_compile: bool = False) -> None:
    _options["jitCompile"] = "enable" if jit_compile else "disable"


def is_jit_compile_false() -> bool:
    return _options.get("jitCompile", "disable") == "disable"


matmul = types.SimpleNamespace(allow_hf32=False)
conv = types.SimpleNamespace(allow_hf32=True)
config = types.SimpleNamespace(allow_internal_format=False)

# below the names they use
from . import amp, memory, random, streams  # noqa: E402,F401
from .memory import (  # noqa: E402,F401
    empty_cache,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from .random import (  # noqa: E402,F401
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from .streams import (  # noqa: E402,F401
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'torch.npu' has no attribute {name!r} (simulated NPU)")
