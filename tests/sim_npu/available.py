"""Whether the simulated NPU may be put on this machine's path. Standard library only.

``python tests/sim_npu/available.py`` prints the reason why not and exits 1, or exits 0.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def unavailable_reason() -> str | None:
    """Why the simulated NPU must not or cannot be used here, or None if it can.

    A real device, or the real torch_npu, is never hidden behind the simulated one.
    """
    devices = sorted(Path("/dev").glob("davinci[0-9]*"))
    if devices:
        return f"this machine has an Ascend NPU ({devices[0]}), which the simulated one would hide"
    for distribution in importlib.metadata.distributions(name="torch_npu"):
        folder = Path(str(distribution.locate_file("torch_npu"))).resolve().parent
        if folder != HERE:
            return f"torch_npu {distribution.version} in {folder} is real: the simulated one would hide it"
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler} is not on PATH (install g++, or set CXX)"
    return None


if __name__ == "__main__":
    reason = unavailable_reason()
    if reason is not None:
        print(f"simulated NPU unavailable: {reason}", file=sys.stderr)
        raise SystemExit(1)
