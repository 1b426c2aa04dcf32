"""Checks that need a process, or ranks, of their own.

A test module runs one of its functions there: it is started as ``python -m MODULE NAME`` and calls itself.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def start(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start Python with these arguments, and wait for its end."""
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )


def run_check(check: Callable[[], None], **environment: str) -> None:
    """Call a function of a test module in a process of its own."""
    done = start("-m", _module(check), check.__name__, **environment)
    assert done.returncode == 0, done.stdout + done.stderr


def run_ranks(check: Callable[[], None]) -> None:
    """Call a function of a test module on two ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = start(*launcher, "-m", _module(check), check.__name__, SIM_NPU_DEVICES="2")
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]


def _module(check: Callable[[], None]) -> str:
    """Return the name of a function's module under the root, whatever pytest calls it."""
    file = Path(check.__code__.co_filename).resolve()
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)
