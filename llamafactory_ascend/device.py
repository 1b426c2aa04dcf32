"""Which device this process trains on, and how its memory is asked; nothing is queried at import."""

import importlib.util
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """The device of this process.

    Attributes:
        type: "npu", "cuda" or "cpu".
        name: what the driver calls it, e.g. "Ascend910B3".
        count: devices visible to this process.
        simulated: True for the simulated NPU of the test suite; no figure of it is one of real hardware.
        reason: why this one.
    """

    type: str
    name: str
    count: int
    simulated: bool
    reason: str


def decide() -> Device:
    """Choose as the host does: NPU before CUDA before CPU."""
    import torch

    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        import torch_npu

        simulated = bool(getattr(torch_npu, "IS_SIMULATED", False))
        source = "the simulated NPU" if simulated else f"torch_npu {torch_npu.__version__}"
        return Device("npu", npu.get_device_name(0), npu.device_count(), simulated, f"{source} offers devices")
    missing = "torch_npu is not installed" if importlib.util.find_spec("torch_npu") is None else "torch_npu sees no device"
    if torch.cuda.is_available():
        return Device("cuda", torch.cuda.get_device_name(0), torch.cuda.device_count(), False, f"{missing}; CUDA is there")
    return Device("cpu", "CPU", 1, False, f"{missing}; no CUDA")


def memory(device_type: str) -> dict[str, int] | None:
    """Return current and peak allocated and reserved bytes of the current device; None on a CPU."""
    import torch

    module: Any = getattr(torch, device_type, None)
    if device_type == "cpu" or module is None:
        return None
    return {
        "allocated": module.memory_allocated(),
        "peak_allocated": module.max_memory_allocated(),
        "reserved": module.memory_reserved(),
        "peak_reserved": module.max_memory_reserved(),
    }
