"""Writing the report: atomic, and safe against other ranks that write the same file."""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "ascend_report.json"


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader or a kill never meets half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes files only their owner can read
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read(path: Path) -> dict[str, Any]:
    """Return the report at ``path``, {} where there is none or it is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def update(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Read, change and write the report in ``folder`` while no other process does."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)  # the folder itself is locked: no lock file is left behind
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / NAME
        write_atomic(path, json.dumps(change(read(path)), ensure_ascii=False, indent=2) + "\n")
    finally:
        os.close(lock)


def set_aside(folder: Path) -> None:
    """Keep the report of an earlier run in the same folder under the time it started."""
    path = folder / NAME
    if path.exists():
        started = str(read(path).get("started", "unknown")).replace(":", "")
        path.rename(folder / f"ascend_report.{started}.json")
