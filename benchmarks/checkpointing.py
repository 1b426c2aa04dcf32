"""What checkpointing saves: stock, the plugin and a plain Trainer beside the floor, on the simulated NPU.

    python benchmarks/checkpointing.py [--work FOLDER]

All are measured in this invocation, each in a process of its own, on the case of `text_case.py`: the plugin
twice, with stock's operators (`kernels: off`), which is what is required of, and with `kernels: auto`. Peaks
are the bytes requested from the simulated device and launches the operators sent to it, copies and
synchronisations included; neither is a figure of real hardware. What the floor is made of stands in
`checkpointing_floor.py`. Progress goes to stderr; the last line of stdout is JSON. The exit code is 1 where
the losses of stock's operators differ or a requirement of REQUIRED is missed.
"""

import argparse
import json
import operator
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the packages below, when run by its path

from benchmarks.text_case import DATA, MODEL, RECIPE  # noqa: E402
from tests.assets import build  # noqa: E402
from tests.running import Result, Train, environment  # noqa: E402

SIMULATOR = ROOT / "tests" / "sim_npu"
MIB = 1 << 20
console = Console(stderr=True, highlight=False, soft_wrap=True)
COMPARE = {">=": operator.ge, "<=": operator.le}
# key: how the figure must compare, and with what
REQUIRED: dict[str, tuple[str, float]] = {
    "ratio": (">=", 7.5),
    "launch_ratio": ("<=", 1.05),
    "vs_trainer_peak": ("<=", 1.0),
    "vs_trainer_launches": ("<=", 0.85),
    "over_floor": ("<=", 1.15),
    "kernels_peak_ratio": ("<=", 1.0),
}


@dataclass(frozen=True)
class Measured:
    """One run: peak in bytes, operator launches, and the losses and gradient norms it logged."""

    peak: int
    launches: int
    losses: list[float]
    grad_norms: list[float]


def prepare_environment(cache: Path) -> None:
    """Let every child use the simulated NPU with one thread."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SIMULATOR)])
    os.environ.setdefault("SIM_NPU_CACHE", str(cache / "sim_npu"))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"


def measure_host(assets: Path, folder: Path, **how: Any) -> Measured:
    """Run `llamafactory-cli train`, as a user does."""
    folder.mkdir()
    result = Train(assets, folder, simulator_missing=None)(timeout=1800, **{**RECIPE, **how})
    if result.code:
        raise SystemExit(f"llamafactory-cli ended with {result.code}:\n{result.text[-4000:]}")
    return Measured(result.peak(), sum(result.operators.values()), result.losses, result.grad_norms)


def measure_trainer(assets: Path, work: Path) -> Measured:
    """Run the plain Trainer."""
    record = work / "trainer.jsonl"
    data = assets / "data" / f"{DATA}.json"
    arguments = ["benchmarks.checkpointing_trainer", str(assets / MODEL), str(data), str(work / "trainer")]
    logged = json.loads(run_module(arguments, record))
    result = Result(
        0, "", work, [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    )
    return Measured(result.peak(), sum(result.operators.values()), logged["losses"], logged["grad_norms"])


def measure_floor(assets: Path, work: Path) -> dict[str, Any]:
    """Return what `checkpointing_floor.py` prints."""
    arguments = ["benchmarks.checkpointing_floor", str(assets / MODEL)]
    found: dict[str, Any] = json.loads(run_module(arguments, work / "floor.jsonl"))
    return found


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


def measure(work: Path) -> dict[str, Any]:
    """Measure all of them and return the figures."""
    with console.status("building the model and the data"):
        assets = work / "assets"
        build(assets, [MODEL, "data"])
    with console.status("stock"):
        stock = measure_host(assets, work / "stock", plugin=False)
    console.print(f"stock   {show(stock)}")
    with console.status("plugin"):
        plugin = measure_host(assets, work / "plugin")
    console.print(f"plugin  {show(plugin)}")
    with console.status("plugin with its kernels"):
        kernels = measure_host(assets, work / "kernels", ascend={"kernels": "auto"})
    console.print(f"kernels {show(kernels)}")
    with console.status("plain Trainer"):
        trainer = measure_trainer(assets, work)
    console.print(f"trainer {show(trainer)}")
    with console.status("floor"):
        floor = measure_floor(assets, work)
    console.print(f"floor   {floor['floor'] / MIB:8.2f} MiB  {floor}")
    return {
        "stock_peak_mib": round(stock.peak / MIB, 2),
        "plugin_peak_mib": round(plugin.peak / MIB, 2),
        "kernels_peak_mib": round(kernels.peak / MIB, 2),
        "trainer_peak_mib": round(trainer.peak / MIB, 2),
        "ratio": round(stock.peak / plugin.peak, 4),
        "kernels_peak_ratio": round(kernels.peak / plugin.peak, 4),
        "vs_trainer_peak": round(plugin.peak / trainer.peak, 4),
        "vs_trainer_launches": round(plugin.launches / trainer.launches, 4),
        "floor_mib": round(floor["floor"] / MIB, 2),
        "over_floor": round(plugin.peak / floor["floor"], 4),
        "launch_ratio": round(plugin.launches / stock.launches, 4),
        "losses_equal": (plugin.losses, plugin.grad_norms) == (stock.losses, stock.grad_norms),
    }


def show(run: Measured) -> str:
    return f"{run.peak / MIB:8.2f} MiB  {run.launches:8,} launches  losses {run.losses}"


def missed(figures: dict[str, Any]) -> list[str]:
    """Return a sentence for each requirement that the figures miss."""
    lines = [
        f"{key} is {figures[key]}, required is {sign} {limit}"
        for key, (sign, limit) in REQUIRED.items()
        if not COMPARE[sign](figures[key], limit)
    ]
    return lines if figures["losses_equal"] else [*lines, "losses or gradient norms differ from stock's"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of checkpointing, on the simulated NPU.")
    parser.add_argument(
        "--work", type=Path, help="folder for the runs, kept afterwards (default: a temporary one)"
    )
    given = parser.parse_args().work
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(given or temporary).resolve()
        work.mkdir(parents=True, exist_ok=True)
        prepare_environment(work)
        figures = measure(work)
    for line in missed(figures):
        console.print(f"[bold red]{line}")
    print(json.dumps(figures))
    raise SystemExit(bool(missed(figures)))


if __name__ == "__main__":
    main()
