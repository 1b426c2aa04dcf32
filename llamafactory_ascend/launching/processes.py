"""Processes of this machine, as /proc shows them; where there is none (macOS), nothing is known of them."""

import contextlib
import os
from pathlib import Path

PROC = Path("/proc")
PARENT, BORN = 1, 19  # fields of /proc/PID/stat behind the name, which may hold blanks


def _stat(pid: int | str) -> list[str]:
    """Return the fields behind the name: state, parent, ...; [] where there is no such process."""
    with contextlib.suppress(OSError):
        return (
            (PROC / str(pid) / "stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    return []


def born(pid: int) -> int | None:
    """Return when a process was started, in ticks since the machine was; None where it is gone."""
    fields = _stat(pid)
    return int(fields[BORN]) if fields and fields[0] not in "ZX" else None


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and not yet waited for."""
    if not PROC.is_dir():
        return []
    found = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    return [child for child in found if (fields := _stat(child)) and int(fields[PARENT]) == pid]


def send(pid: int, signum: int) -> None:
    """Send a signal to a process that may have gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
