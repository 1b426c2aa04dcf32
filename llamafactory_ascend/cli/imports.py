"""What the probe did not reach: each package imported in its own process, so that a broken one is named."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from llamafactory_ascend.cli.diagnosis import Finding, Probe

# distribution -> what is imported, in the order in which they build on each other
PACKAGES = {
    "torch": "torch",
    "torch_npu": "torch_npu",
    "triton": "triton",
    "triton-ascend": "triton",
    "transformers": "transformers",
    "peft": "peft",
    "accelerate": "accelerate",
    "llamafactory": "llamafactory",
    "flash-linear-attention": "fla",
}
TIMEOUT = 120  # seconds
WORKERS = 4


def judge(versions: Mapping[str, str], probe: Probe) -> Iterator[Finding]:
    """Import what is installed and the probe did not come to; say which of them fail.

    What fails only because something before it does, as everything does without torch, is not said again.
    """
    seen = {str(stage["stage"]) for stage in probe.stages}
    if probe.value("torch") is not None:
        seen.add("torch_npu")  # `import torch` loads it; the device says what came of it
    names = list(dict.fromkeys(PACKAGES[name] for name in versions if name in PACKAGES))
    todo = [name for name in names if name not in seen]
    causes = [str(stage["error"]) for stage in probe.failed()]
    if probe.unfinished():
        causes.append(f"import ends the process with code {probe.code}: it said nothing")
    with ThreadPoolExecutor(WORKERS) as pool:
        for name, problem in zip(todo, pool.map(_import, todo), strict=True):
            if problem and not any(problem in cause or cause in problem for cause in causes):
                yield Finding("error", name, problem, f'see all of it with: python -c "import {name}"')


def _import(name: str) -> str:
    """Return what is wrong with a package, "" where it can be imported."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"import {name}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"import did not end within {TIMEOUT} s"
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return f"import ends the process with code {done.returncode}: {last}" if done.returncode < 0 else last
