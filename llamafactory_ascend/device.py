"""Which device this process trains on, and how its memory is asked; nothing is queried at import."""

import importlib.metadata
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


def decide(used: str | None = None) -> Device:
    """Choose as the host does: NPU before CUDA before CPU.

    Asks the driver, so call it once the host has set this rank's device: asked earlier, every rank would open
    a context on the first one.

    Args:
        used: the type the host has decided on, where it is known (`use_cpu: true` passes an NPU by).
    """
    npu, no_npu = _npu()
    cuda, no_cuda = (None, "") if npu else _cuda(no_npu)
    found = npu or cuda or Device("cpu", "CPU", 1, False, f"{no_npu}; {no_cuda}")
    if used is None or used == found.type:
        return found
    if used == "cpu":
        return Device("cpu", "CPU", 1, False, f"the recipe chose it, past {found.name} ({found.reason})")
    return Device(used, used, 1, False, f"chosen by the host; {found.reason}")


def _npu() -> tuple[Device | None, str]:
    import torch

    if importlib.util.find_spec("torch_npu") is None:
        return None, "torch_npu is not installed"
    npu = getattr(torch, "npu", None)
    if npu is None:
        return None, f"torch_npu {_version()} is installed but was not loaded by `import torch`"
    try:
        if not npu.is_available():
            return None, f"torch_npu {_version()} sees no device"
        import torch_npu

        simulated = bool(getattr(torch_npu, "IS_SIMULATED", False))
        source = "the simulated NPU" if simulated else f"torch_npu {torch_npu.__version__}"
        name = npu.get_device_name(npu.current_device())
        return Device("npu", name, npu.device_count(), simulated, f"{source} offers devices"), ""
    except Exception as error:  # without CANN or with another driver it raises whatever its libraries raise
        return None, f"torch_npu {_version()} does not work: {_first_line(error)}"


def _cuda(no_npu: str) -> tuple[Device | None, str]:
    import torch

    try:
        if not torch.cuda.is_available():
            return None, "no CUDA"
        name = torch.cuda.get_device_name(torch.cuda.current_device())
        return Device("cuda", name, torch.cuda.device_count(), False, f"{no_npu}; CUDA is there"), ""
    except Exception as error:
        return None, f"CUDA does not work: {_first_line(error)}"


def _version() -> str:
    try:
        return importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def memory(device_type: str) -> dict[str, int] | None:
    """Return current and peak allocated and reserved bytes of the current device; None on a CPU."""
    import torch

    module: Any = getattr(torch, device_type, None)
    if device_type == "cpu" or not hasattr(module, "max_memory_reserved"):
        return None
    try:
        return {
            "allocated": module.memory_allocated(),
            "peak_allocated": module.max_memory_allocated(),
            "reserved": module.memory_reserved(),
            "peak_reserved": module.max_memory_reserved(),
        }
    except Exception:  # asked for a report on a dead device: the failure itself matters more
        return None
