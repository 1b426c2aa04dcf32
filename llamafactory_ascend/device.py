"""Which device this process trains on, what it can do, and how its memory is asked; nothing at import."""

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
# What torch_npu calls the SoCs whose cores have no bfloat16: the first generation of training chips, whose
# last one is "Ascend910B" without a digit (Atlas A2 is "Ascend910B1" to "Ascend910B4"), and the 310 family.
NO_BFLOAT16 = re.compile(r"Ascend(910(A|ProA|PremiumA|ProB|B)$|310)")


@dataclass(frozen=True)
class Device:
    """The device of this process.

    Attributes:
        type: "npu", "cuda" or "cpu".
        name: what the driver calls it, e.g. "Ascend910B3": on an NPU the name of its SoC.
        count: devices visible to this process.
        simulated: True for the simulated NPU of the test suite; no figure of it is one of real hardware.
        reason: why this one.
        visible: what the environment leaves visible, "" for all devices.
        bfloat16: True where it computes in bfloat16. float16 and float32 work on every NPU.
        memory: bytes of one device, None on a CPU.
    """

    type: str
    name: str
    count: int
    simulated: bool
    reason: str
    visible: str = ""
    bfloat16: bool = True
    memory: int | None = None


_assumed: list[Device] = []


def assume(found: Device) -> None:
    """Decide for this device from now on, in this process, whatever is here: to judge another machine."""
    _assumed[:] = [found]


def decide(used: str | None = None) -> Device:
    """Choose as the host does: NPU before CUDA before CPU.

    Asks the driver, so call it once the host has set this rank's device: asked earlier, every rank would open
    a context on the first one.

    Args:
        used: the type the host has decided on, where it is known (`use_cpu: true` passes an NPU by).
    """
    if _assumed:
        return _assumed[0]
    npu, no_npu = _npu()
    cuda, no_cuda = (None, "") if npu else _cuda(no_npu)
    found = npu or cuda or Device("cpu", "CPU", 1, False, f"{no_npu}; {no_cuda}")
    if used is None or used == found.type:
        return found
    if used == "cpu":
        return Device("cpu", "CPU", 1, False, f"the recipe chose it, past {found.name} ({found.reason})")
    return Device(used, used, 1, False, f"chosen by the host; {found.reason}")


def is_installed() -> bool:
    """True where torch_npu is installed, usable or not. Nothing is imported."""
    return importlib.util.find_spec("torch_npu") is not None


def supports_bfloat16(soc: str, driver_says: bool) -> bool:
    """Say whether a SoC computes in bfloat16: the driver must say so, and it must not be known to lack it."""
    return driver_says and not NO_BFLOAT16.match(soc)


def visible_ids(text: str) -> list[int]:
    """Return the device ids that CANN reads: up to the first character that is no digit and no comma.

    From "0, 1" it reads 0 alone, because of the blank.
    """
    read = re.match(r"\d+(,\d+)*", text)
    return [int(part) for part in read[0].split(",")] if read else []


def count_visible(environment: Mapping[str, str]) -> int:
    """Return how many NPUs the ranks of this node can use, 0 where there is none or torch_npu does not work.

    Opens no device: the number alone is asked, as the host does before it starts torchrun.
    """
    import torch

    try:
        count = int(torch.npu.device_count())  # type: ignore[attr-defined]
    except Exception:  # without CANN or with another driver it raises whatever its libraries raise
        return 0
    return min(count, len(visible_ids(environment[VISIBLE]))) if environment.get(VISIBLE) else count


def bind(environment: Mapping[str, str]) -> str:
    """Make the card of this rank the current one, so that nothing is ever allocated on another.

    Returns:
        The card, e.g. "npu:1"; "" where this is no rank of several or has no card of its own.
    """
    import torch

    rank = environment.get("LOCAL_RANK", "")
    if not rank.isdigit() or int(rank) >= count_visible(environment):
        return ""
    torch.npu.set_device(int(rank))  # type: ignore[attr-defined]
    return f"npu:{rank}"


def _npu() -> tuple[Device | None, str]:
    import torch

    if not is_installed():
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
        found = Device(
            "npu",
            name,
            npu.device_count(),
            simulated,
            f"{source} offers devices",
            os.environ.get(VISIBLE, ""),
            supports_bfloat16(name, npu.is_bf16_supported()),
            npu.get_device_properties(npu.current_device()).total_memory,
        )
        return found, ""
    except Exception as error:  # without CANN or with another driver it raises whatever its libraries raise
        return None, f"torch_npu {_version()} does not work: {_first_line(error)}"


def _cuda(no_npu: str) -> tuple[Device | None, str]:
    import torch

    try:
        if not torch.cuda.is_available():
            return None, "no CUDA"
        index = torch.cuda.current_device()
        found = Device(
            "cuda",
            torch.cuda.get_device_name(index),
            torch.cuda.device_count(),
            False,
            f"{no_npu}; CUDA is there",
            os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            torch.cuda.is_bf16_supported(),
            torch.cuda.get_device_properties(index).total_memory,
        )
        return found, ""
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
            "peak_allocated": max(module.max_memory_allocated(), _peaks.get("allocated", 0)),
            "reserved": module.memory_reserved(),
            "peak_reserved": max(module.max_memory_reserved(), _peaks.get("reserved", 0)),
        }
    except Exception:  # asked for a report on a dead device: the failure itself matters more
        return None


_peaks: dict[str, int] = {}  # of this process, from before a restart


def restart_peak(device_type: str) -> None:
    """Let the allocator's peaks begin anew; ``memory`` goes on to tell the highest of the process."""
    import torch

    module: Any = getattr(torch, device_type)
    _peaks["allocated"] = max(module.max_memory_allocated(), _peaks.get("allocated", 0))
    _peaks["reserved"] = max(module.max_memory_reserved(), _peaks.get("reserved", 0))
    module.reset_peak_memory_stats()


def forget_peaks(device_type: str) -> None:
    """Let the peaks that ``memory`` tells begin anew, where the device counts them."""
    import torch

    module: Any = getattr(torch, device_type, None)
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats()
        _peaks.clear()


def available(device_type: str) -> int:
    """Return the bytes of the current device that this process has or can still get: what others leave."""
    import torch

    module: Any = getattr(torch, device_type)
    free, _ = module.mem_get_info()
    return int(free + module.memory_reserved())
