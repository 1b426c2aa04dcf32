"""``python -m demo`` from the repository's root: one stock command, without the plugin and with it.

It trains a tiny Qwen3.5 hybrid on the shipped rows on the simulated NPU, or on the CPU where that cannot be
had. No figure it prints is one of real hardware.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.running import Result, environment
from tests.sim_npu.available import unavailable_reason

ROOT = Path(__file__).parent.parent
OUT = ROOT / "demo" / "out"
STEPS = yaml.safe_load((ROOT / "demo" / "recipe.yaml").read_text(encoding="utf-8"))["max_steps"]
MIB = 1 << 20
TOLERANCE = 2e-3  # relative; with the plugin's kernels sums are added in another order, in bfloat16
# in a process of its own: torch would load the simulated NPU here, and Transformers' bars would be drawn
BUILD = "import sys, pathlib, demo.model; demo.model.build_model(pathlib.Path(sys.argv[1]))"


def main() -> int:
    """Run the demo and return its exit code."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)
    os.chdir(ROOT)
    OUT.mkdir(exist_ok=True)
    reason = unavailable_reason()
    where = "the CPU" if reason else "the simulated NPU"
    why = f": {reason}" if reason else ". No figure below is one of real hardware. The first run compiles it."
    console.print(f"Training on {where}{why}")
    model = OUT / "model"
    if not model.exists():
        console.print("Building a tiny Qwen3.5 hybrid with random weights")
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
        subprocess.run([sys.executable, "-c", BUILD, str(model)], env=os.environ | quiet, check=True)

    results = []
    for plugin in (False, True):
        result = train(plugin, reason is None, model, console)
        if result.code != 0:
            tail = "\n".join(result.text.splitlines()[-25:])
            text = f"{tail}\n\nexit code {result.code}; all of it in {log_file(plugin)}"
            console.print(text, markup=False, soft_wrap=True)
            return 1
        results.append(result)
    stock, ours = results
    console.print(compare(stock, ours, where))
    if not reason:
        console.print(
            "Losses differ by rounding alone: with the plugin's kernels sums are added in another order. "
            "`ascend: {kernels: off}` keeps stock's."
        )
    console.print(f"report: {ours.output.relative_to(ROOT) / 'ascend_report.json'}")
    return 0 if all(map(agree, stock.losses, ours.losses)) else 1


def agree(before: float, after: float) -> bool:
    """True where two losses differ by rounding only."""
    return abs(after - before) <= TOLERANCE * abs(before)


def train(plugin: bool, npu: bool, model: Path, console: Console) -> Result:
    """Run the stock command once, with the plugin or without."""
    output = OUT / ("plugin" if plugin else "stock")
    records = OUT / f"{output.name}.simulator.jsonl"
    steps = output / "trainer_log.jsonl"
    shutil.rmtree(output, ignore_errors=True)  # of an earlier demo: the host refuses a folder that is full
    records.unlink(missing_ok=True)
    env = {**environment(npu=npu, plugin=plugin), "SIM_NPU_REPORT": str(records), "OMP_NUM_THREADS": "1"}
    if npu:
        env["PYTHONPATH"] = str(ROOT / "tests" / "sim_npu")
        env.setdefault("SIM_NPU_CACHE", str(OUT / "sim_npu"))
    command = [
        "llamafactory-cli",
        "train",
        "demo/recipe.yaml",
        f"model_name_or_path={model}",
        f"output_dir={output}",
    ]
    if not npu:
        command.append("use_cpu=true")  # without it Transformers refuses bf16 on a CPU
    command[0] = str(Path(sys.executable).with_name(command[0]))
    console.print(
        f"LLAMAFACTORY_ASCEND={int(plugin)} llamafactory-cli {' '.join(command[1:3])}", markup=False
    )
    with log_file(plugin).open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        follow(process, steps, console)
    text = log_file(plugin).read_text(encoding="utf-8", errors="replace")
    lines = records.read_text(encoding="utf-8").splitlines() if records.exists() else []
    return Result(process.returncode, text, output, [json.loads(line) for line in lines])


def follow(process: subprocess.Popen[bytes], steps: Path, console: Console) -> None:
    """Show the steps of a run until it ends: a bar on a terminal, a line for each elsewhere.

    Args:
        steps: where the host writes one line a step.
    """
    columns = TextColumn("  step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=console) if console.is_terminal else None
    task = bar.add_task("", total=STEPS) if bar else None
    seen = 0
    with bar or contextlib.nullcontext():
        while process.poll() is None:
            time.sleep(0.3)
            written = len(steps.read_text(encoding="utf-8").splitlines()) if steps.exists() else 0
            done = min(written, STEPS)  # the last line sums up the run
            if bar and task is not None:
                bar.update(task, completed=done)
            elif done != seen:
                console.print(f"  step {done} of {STEPS}")
            seen = done


def log_file(plugin: bool) -> Path:
    return OUT / ("plugin.log" if plugin else "stock.log")


def compare(stock: Result, ours: Result, where: str) -> Table:
    """Return the table of both runs."""
    table = Table(title=f"stock LLaMA-Factory and the plugin on {where}", title_justify="left")
    for column, justify in (("", "left"), ("stock", "right"), ("with the plugin", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for step, (before, after) in enumerate(zip(stock.losses, ours.losses, strict=True), 1):
        verdict = f"within {TOLERANCE:.1%}" if agree(before, after) else "different"
        verdict = "same" if before == after else verdict
        table.add_row(f"loss, step {step}", f"{before:.4f}", f"{after:.4f}", verdict)
    table.add_section()
    if stock.simulator and ours.simulator:
        before, after = stock.peak(), ours.peak()
        table.add_row(
            "peak memory",
            f"{before / MIB:.1f} MiB",
            f"{after / MIB:.1f} MiB",
            f"{after / before:.0%} of stock",
        )
        launches = stock.operators.total(), ours.operators.total()
        table.add_row(
            "operator launches",
            *(f"{count:,}" for count in launches),
            f"{launches[1] / launches[0]:.0%} of stock",
        )
    else:
        table.add_row("peak memory, operator launches", "-", "-", "need the simulated NPU")
    return table


if __name__ == "__main__":
    raise SystemExit(main())
