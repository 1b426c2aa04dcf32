"""What a run used: memory and operator counts, one JSON line a process (``SIM_NPU_REPORT``)."""

import atexit
import json
import os
from typing import Any

import torch

from . import npu


def collect() -> dict[str, Any]:
    """Process id, rank, memory statistics of each used device, calls of each operator.

    The operator counts are empty without ``SIM_NPU_TRACE=1``.
    """
    stats = {i: npu.memory_stats(i) for i in range(npu.device_count())}
    counts = (line.rsplit(" ", 1) for line in torch.ops.simnpu.op_counts().splitlines())
    return {
        "pid": os.getpid(),
        "rank": os.environ.get("RANK"),
        "stats": {i: s for i, s in stats.items() if s["num_device_alloc"]},
        "ops": dict(counts),
    }


def append(path: str) -> None:
    report = collect()
    if not report["stats"]:
        return  # a process that never touched the device has nothing to say
    line = (json.dumps(report) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)  # one write, so that ranks do not interleave
    finally:
        os.close(descriptor)


def apply_environment() -> None:
    """Act on ``SIM_NPU_DENY`` and ``SIM_NPU_REPORT``."""
    for name in os.environ.get("SIM_NPU_DENY", "").split(","):
        if name.strip():
            torch.ops.simnpu.deny(name.strip())
    if os.environ.get("SIM_NPU_REPORT"):
        atexit.register(append, os.environ["SIM_NPU_REPORT"])
