"""A process of ours that may die, and the stages it has written by then; see ``host/probe.py``."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamafactory_ascend.cli.diagnosis import Probe


def collect(module: str, words: Sequence[str], timeout: float) -> Probe:
    """Run a module that writes its stages to the file it is given, and read what came of it.

    Args:
        module: dotted name; called with the file and ``words``.
        timeout: seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stages.jsonl"
        code: int | None = None
        try:
            done = subprocess.run(
                # -P: a folder called torch in the user's working directory is not the torch that trains
                [sys.executable, "-P", "-m", module, str(path), *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=timeout,
            )
            code, stderr = done.returncode, done.stderr
        except subprocess.TimeoutExpired as expired:
            stderr = (expired.stderr or b"").decode(errors="replace")
        return Probe(read(path), code, stderr)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the stages; a last line that was cut off, as the process was killed, is left out."""
    found: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found
