"""What the benchmarks on the simulated NPU share: where they work, how a run is measured, how they end."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from tests.running import Result, Train, environment

ROOT = Path(__file__).resolve().parent.parent
SIMULATOR = ROOT / "tests" / "sim_npu"
MIB = 1 << 20
console = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Measured:
    """One run: peak in bytes, operator launches, and the losses and gradient norms it logged."""

    peak: int
    launches: int
    losses: list[float]
    grad_norms: list[float]

    def __str__(self) -> str:
        return f"{self.peak / MIB:8.2f} MiB  {self.launches:8,} launches  losses {self.losses}"


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the command line that knows `--work`."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument(
        "--work", type=Path, help="folder for the runs, kept afterwards (default: a temporary one)"
    )
    return found


@contextmanager
def working(given: Path | None) -> Iterator[Path]:
    """Make a folder to work in, and let every child use the simulated NPU with one thread."""
    with tempfile.TemporaryDirectory() as temporary:
        work = (given or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SIMULATOR)])
        os.environ.setdefault("SIM_NPU_CACHE", str(work / "sim_npu"))
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        yield work


def conclude(figures: dict[str, Any], missed: Sequence[str]) -> NoReturn:
    """Print what is missed on stderr and the figures on stdout; the exit code is 1 where anything is."""
    for line in missed:
        console.print(f"[bold red]{line}")
    print(json.dumps(figures))
    raise SystemExit(bool(missed))


def measure_host(assets: Path, folder: Path, recipe: dict[str, Any], **how: Any) -> Measured:
    """Run `llamafactory-cli train`, as a user does."""
    folder.mkdir()
    result = Train(assets, folder, simulator_missing=None)(timeout=1800, **{**recipe, **how})
    if result.code:
        raise SystemExit(f"llamafactory-cli ended with {result.code}:\n{result.text[-4000:]}")
    return Measured(result.peak(), sum(result.operators.values()), result.losses, result.grad_norms)


def measure_trainer(case: str, assets: Path, work: Path) -> Measured:
    """Run the plain Trainer of `trainer.py` on a case of `cases.py`."""
    record = work / f"{case}_trainer.jsonl"
    logged = json.loads(run_module(["benchmarks.trainer", case, str(assets), str(work / "trainer")], record))
    lines = record.read_text(encoding="utf-8").splitlines()
    result = Result(0, "", work, [json.loads(line) for line in lines])
    return Measured(result.peak(), sum(result.operators.values()), logged["losses"], logged["grad_norms"])


def run_module(arguments: list[str], record: Path) -> str:
    """Run a module of this package without the plugin and return the last line it prints."""
    process = subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**environment(plugin=False), "SIM_NPU_REPORT": str(record)},
        capture_output=True,
        text=True,
        timeout=1800,
        cwd=ROOT,
    )
    if process.returncode:
        raise SystemExit(f"{arguments[0]} ended with {process.returncode}:\n{process.stderr[-4000:]}")
    return process.stdout.splitlines()[-1]
