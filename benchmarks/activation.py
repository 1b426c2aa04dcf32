"""What the plugin adds to `import torch`, for every program of the machine that has it installed.

torch ends its import by reading the entry points of all distributions and calling those of its group. The
plugin adds one distribution to that and one call. Both are timed in fresh processes, directly, in CPU time
(user + system): what torch itself needs varies by 50 ms on a shared machine, so the difference of two
imports says nothing about one millisecond. That difference is reported too, `whole_import_difference_ms`: the
median over neighbouring runs with and without the plugin on the path, a check that nothing else is added.
`added_ms_without_host` is the time in an environment without llamafactory.

    python benchmarks/activation.py [--repeats 10]

Requirements: 5 ms and 1 % at most, 1 ms where llamafactory is not installed. The last line on stdout is JSON.
"""

import argparse
import compileall
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "llamafactory_ascend"
# What `import torch` does for one distribution, after a torch that was told not to.
DIRECT = """
import importlib.metadata, os, sys, time
sys.path[:] = {path!r}
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
begun = time.process_time()
for distribution in importlib.metadata.distributions(path=sys.path[:1]):
    for entry in distribution.entry_points.select(group="torch.backends"):
        entry.load()()
print((time.process_time() - begun) * 1000)
assert any(type(finder).__name__ == "Watcher" for finder in sys.meta_path)
"""
WHOLE = """
import sys, time
sys.path[:] = {path!r}
begun = time.process_time()
import torch
print((time.process_time() - begun) * 1000)
"""


def install(folder: Path) -> None:
    """Lay out package and metadata as pip would, with bytecode."""
    target = folder / "with"
    shutil.copytree(PACKAGE, target / "llamafactory_ascend", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(target, quiet=1)
    distribution = importlib.metadata.distribution("llamafactory-ascend-plugin")
    metadata = target / f"llamafactory_ascend_plugin-{distribution.version}.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (metadata / name).write_text(distribution.read_text(name) or "", encoding="utf-8")
    (folder / "without").mkdir()


def site(mirror: Path, *hidden: str) -> list[str]:
    """Return a path with every package of this environment but ours and those whose names begin so."""
    mirror.mkdir()
    ours = ("llamafactory_ascend", "_editable_impl_llamafactory_ascend")
    paths = []
    for entry in sys.path[1:]:
        if not entry.endswith("site-packages"):
            paths.append(entry)
            continue
        for item in Path(entry).iterdir():
            if not item.name.startswith((*ours, *hidden)):
                (mirror / item.name).symlink_to(item)
        paths.append(str(mirror))
    return [path for path in paths if path and not (Path(path) / "llamafactory_ascend").exists()]


def measure(script: str, first: Path, base: list[str]) -> float:
    """Return the CPU milliseconds that a fresh process reports."""
    drop = ("PYTHONPATH", "LLAMAFACTORY_ASCEND", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    env = {key: value for key, value in os.environ.items() if key not in drop} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-c", script.format(path=[str(first), *base])]
    return float(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the plugin adds to `import torch`.")
    parser.add_argument("--repeats", type=int, default=10, help="runs of each kind (10)")
    repeats = parser.parse_args().repeats
    found: dict[str, list[float]] = {"added": [], "hidden": [], "with": [], "without": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install(folder)
        base, no_host = site(folder / "site"), site(folder / "no_host", "llamafactory")
        measure(WHOLE, folder / "with", base)  # fills the file cache
        for repeat in range(repeats):
            found["added"].append(measure(DIRECT, folder / "with", base))
            found["hidden"].append(measure(DIRECT, folder / "with", no_host))
            for kind in ("with", "without") if repeat % 2 else ("without", "with"):
                found[kind].append(measure(WHOLE, folder / kind, base))
            print(f"{repeat + 1}/{repeats}: {found['added'][-1]:.3f} ms", file=sys.stderr)
    added, without = statistics.median(found["added"]), statistics.median(found["without"])
    difference = statistics.median(a - b for a, b in zip(found["with"], found["without"], strict=True))
    result = {
        "added_ms": round(added, 3),
        "added_share": round(added / without, 5),
        "added_ms_without_host": round(statistics.median(found["hidden"]), 3),
        "whole_import_difference_ms": round(difference, 1),
        "import_torch_ms": round(without, 1),
        "measured": "CPU time, user + system",
        "repeats": repeats,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
