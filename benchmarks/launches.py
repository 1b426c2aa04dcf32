"""Operator launches of a training step: stock against the plugin with its kernels, on the simulated NPU.

    python benchmarks/launches.py [--work FOLDER]

The case is that of `text_case.py`, the whole model, gradient checkpointing on. Stock and plugin run one and
two steps each; the difference is one step, without loading, probing or saving, and with everything backward
recomputes. Launches are the operators sent to the simulated device, copies and synchronisations included;
they are no times, and no figure of real hardware. Progress goes to stderr; the last line of stdout is JSON.
The exit code is 1 where `ratio_to_stock` is above REQUIRED.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the packages below, when run by its path

from benchmarks.checkpointing import prepare_environment  # noqa: E402
from benchmarks.text_case import MODEL, RECIPE  # noqa: E402
from tests.assets import build  # noqa: E402
from tests.running import Train  # noqa: E402

REQUIRED = 0.35
console = Console(stderr=True, highlight=False)


def measure_step(assets: Path, folder: Path, **how: Any) -> Counter[str]:
    """Return the launches of the second step, by operator."""
    folder.mkdir()
    train = Train(assets, folder, simulator_missing=None)
    counts = []
    for steps in (1, 2):
        result = train(timeout=1800, **{**RECIPE, "max_steps": steps, **how})
        if result.code:
            raise SystemExit(f"llamafactory-cli ended with {result.code}:\n{result.text[-4000:]}")
        counts.append(result.operators)
    counts[1].subtract(counts[0])
    return counts[1]


def measure(work: Path) -> dict[str, Any]:
    """Measure both and return the figures."""
    with console.status("building the model and the data"):
        build(work / "assets", [MODEL, "data"])
    with console.status("stock"):
        stock = measure_step(work / "assets", work / "stock", plugin=False)
    console.print(f"stock   {stock.total():8,} launches a step, most of them {show(stock)}")
    with console.status("plugin"):
        plugin = measure_step(work / "assets", work / "plugin", ascend={"kernels": "auto"})
    console.print(f"plugin  {plugin.total():8,} launches a step, most of them {show(plugin)}")
    return {
        "stock_launches": stock.total(),
        "plugin_launches": plugin.total(),
        "ratio_to_stock": round(plugin.total() / stock.total(), 4),
    }


def show(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common(5))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Operator launches of a training step, on the simulated NPU."
    )
    parser.add_argument(
        "--work", type=Path, help="folder for the runs, kept afterwards (default: a temporary one)"
    )
    given = parser.parse_args().work
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(given or temporary).resolve()
        work.mkdir(parents=True, exist_ok=True)
        prepare_environment(work)
        figures = measure(work)
    print(json.dumps(figures))
    raise SystemExit(figures["ratio_to_stock"] > REQUIRED)


if __name__ == "__main__":
    main()
