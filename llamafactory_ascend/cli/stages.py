"""The stages that a process of ours has written for the one that started it; see ``host/probe.py``."""

import contextlib
import json
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """Return the stages; a last line that was cut off, as the process was killed, is left out."""
    found: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found
