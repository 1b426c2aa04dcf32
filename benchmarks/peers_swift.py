"""A peer: ms-swift, in an environment of its own that shares everything else with the one that runs this.

Its dependencies and the host's contradict each other (`datasets`), so pip installs it beside the host, into a
folder from which the host's packages can be seen: torch and Transformers are the very same files.
"""

import json
import os
import re
import subprocess
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.measuring import Measured
from tests.running import Result, environment

OWN = ("ms-swift==4.6.0", "datasets==4.8.4", "qwen_vl_utils", "decord")
SHARED = ("torch", "transformers", "peft", "accelerate")
# What its user can choose from: it is at its best in one or the other, depending on the model.
SETTINGS = {
    "with its NPU patches": [],
    "without its NPU patches": ["--enable_npu_model_patch", "false"],
}
NON_REENTRANT = ["--gradient_checkpointing_kwargs", '{"use_reentrant": false}']


def make_environment(folder: Path) -> Path:
    """Make the environment unless it is complete, and return its `swift`."""
    done = folder / "complete"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        (site,) = (folder / "lib").glob("python*/site-packages")
        (site / "host.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        shared = [f"{name}=={version(name).partition('+')[0]}" for name in SHARED]
        python = folder / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *OWN, *shared], check=True)
        done.write_text("\n".join((*OWN, *shared)) + "\n", encoding="utf-8")
    return folder / "bin" / "swift"


def measure(swift: Path, case: Case, assets: Path, folder: Path, *more: str) -> Measured:
    """Run `swift sft` and return its figures, the losses as it logs them, with four digits."""
    folder.mkdir()
    record, rows = folder / "simulator.jsonl", folder / "rows.json"
    rows.write_text(json.dumps(with_paths(assets / case.folder, case.dataset)), encoding="utf-8")
    process = subprocess.run(
        [swift, "sft", *case.swift_words(assets, rows, folder / "output"), *NON_REENTRANT, *more],
        env={
            **environment(plugin=False),
            "PATH": f"{swift.parent}{os.pathsep}{os.environ['PATH']}",  # it starts `python`
            "SIM_NPU_REPORT": str(record),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        cwd=folder,
    )
    if process.returncode:
        raise SystemExit(f"swift sft ended with {process.returncode}:\n{process.stdout[-4000:]}")
    lines = record.read_text(encoding="utf-8").splitlines()
    result = Result(0, process.stdout, folder, [json.loads(line) for line in lines])
    logged = [
        [float(value) for value in re.findall(rf"'{key}': '([^']+)'", process.stdout)]
        for key in ("loss", "grad_norm")
    ]
    return Measured(result.peak(), sum(result.operators.values()), *logged)


def with_paths(folder: Path, dataset: str) -> list[dict[str, Any]]:
    """Return the rows of a data set, their pictures by whole paths."""
    rows: list[dict[str, Any]] = json.loads((folder / f"{dataset}.json").read_text(encoding="utf-8"))
    for row in rows:
        if "images" in row:
            row["images"] = [str(folder / image) for image in row["images"]]
    return rows
