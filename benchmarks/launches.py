"""Operator launches of a training step: stock against the plugin with its kernels, on the simulated NPU.

    python benchmarks/launches.py [--work FOLDER]

The case is that of `text_case.py`, the whole model, gradient checkpointing on. Stock and plugin run one and
two steps each; the difference is one step, without loading, probing or saving, and with everything backward
recomputes. Launches are the operators sent to the simulated device, copies and synchronisations included;
they are no times, and no figure of real hardware. Progress goes to stderr; the last line of stdout is JSON.
The exit code is 1 where `ratio_to_stock` is above REQUIRED.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # when run by its path

from benchmarks.measuring import conclude, console, parser, working
from benchmarks.text_case import MODEL, RECIPE
from tests.assets import build
from tests.running import Train

REQUIRED = 0.35


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
    given = parser("Operator launches of a training step, on the simulated NPU.").parse_args().work
    with working(given) as work:
        figures = measure(work)
    ratio = figures["ratio_to_stock"]
    missed = [f"ratio_to_stock is {ratio}, required is <= {REQUIRED}"] if ratio > REQUIRED else []
    conclude(figures, missed)


if __name__ == "__main__":
    main()
