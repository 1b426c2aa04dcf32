"""``torch.npu.memory``: what was allocated on the simulated device, to the byte."""

from __future__ import annotations

from typing import Any

import torch

from . import _get_device_index

_STATS = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "requested_bytes.all.current",
    "requested_bytes.all.peak",
    "num_device_alloc",
    "num_device_free",
    "num_ooms",
    "limit",
)


def memory_stats(device: Any = None) -> dict[str, int]:
    """Bytes and counts since the start, or since the last reset.

    ``requested_bytes`` is what was asked for, ``allocated_bytes`` the rounded blocks, ``reserved_bytes`` the
    2 MiB segments under them, ``limit`` the device's capacity.
    """
    stats = dict(zip(_STATS, torch.ops.simnpu.mem_stats(_get_device_index(device)), strict=True))
    for kind in ("current", "peak"):
        stats[f"active_bytes.all.{kind}"] = stats[f"allocated_bytes.all.{kind}"]
    return stats


def memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.peak"]


memory_cached, max_memory_cached = memory_reserved, max_memory_reserved


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes of the device; what is reserved is not free."""
    stats = memory_stats(device)
    return max(stats["limit"] - stats["reserved_bytes.all.current"], 0), stats["limit"]


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return "\n".join(f"{name}: {value}" for name, value in memory_stats(device).items())


def empty_cache() -> None:
    torch._C._accelerator_emptyCache()


def reset_peak_memory_stats(device: Any = None) -> None:
    torch._C._accelerator_resetPeakStats(_get_device_index(device))


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Any = None) -> None:
    torch._C._accelerator_resetAccumulatedStats(_get_device_index(device))


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Let this process use ``fraction`` (0 to 1) of the device's capacity."""
    torch.ops.simnpu.set_memory_fraction(_get_device_index(device), float(fraction))
