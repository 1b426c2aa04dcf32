"""What checkpointing saves: stock, the plugin and a plain Trainer beside the floor, on the simulated NPU.

    python benchmarks/checkpointing.py [--work FOLDER]

All are measured in this invocation, each in a process of its own, on the case of `text_case.py`: the plugin
twice, with stock's operators (`kernels: off`), which is what is required of, and with `kernels: auto`. Peaks
are the bytes requested from the simulated device and launches the operators sent to it, copies and
synchronisations included; neither is a figure of real hardware. What the floor is made of stands in
`checkpointing_floor.py`. Progress goes to stderr; the last line of stdout is JSON. The exit code is 1 where
the losses of stock's operators differ or a requirement of REQUIRED is missed.
"""

import json
import operator
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # when run by its path

from benchmarks.measuring import (
    MIB,
    conclude,
    console,
    measure_host,
    measure_trainer,
    parser,
    run_module,
    working,
)
from benchmarks.text_case import MODEL, RECIPE
from tests.assets import build

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


def measure_floor(assets: Path, work: Path) -> dict[str, Any]:
    """Return what `checkpointing_floor.py` prints."""
    arguments = ["benchmarks.checkpointing_floor", str(assets / MODEL)]
    found: dict[str, Any] = json.loads(run_module(arguments, work / "floor.jsonl"))
    return found


def measure(work: Path) -> dict[str, Any]:
    """Measure all of them and return the figures."""
    with console.status("building the model and the data"):
        assets = work / "assets"
        build(assets, [MODEL, "data"])
    with console.status("stock"):
        stock = measure_host(assets, work / "stock", RECIPE, plugin=False)
    console.print(f"stock   {stock}")
    with console.status("plugin"):
        plugin = measure_host(assets, work / "plugin", RECIPE)
    console.print(f"plugin  {plugin}")
    with console.status("plugin with its kernels"):
        kernels = measure_host(assets, work / "kernels", RECIPE, ascend={"kernels": "auto"})
    console.print(f"kernels {kernels}")
    with console.status("plain Trainer"):
        trainer = measure_trainer("text", assets, work)
    console.print(f"trainer {trainer}")
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


def missed(figures: dict[str, Any]) -> list[str]:
    """Return a sentence for each requirement that the figures miss."""
    lines = [
        f"{key} is {figures[key]}, required is {sign} {limit}"
        for key, (sign, limit) in REQUIRED.items()
        if not COMPARE[sign](figures[key], limit)
    ]
    return lines if figures["losses_equal"] else [*lines, "losses or gradient norms differ from stock's"]


def main() -> None:
    given = parser("Peak memory of checkpointing, on the simulated NPU.").parse_args().work
    with working(given) as work:
        figures = measure(work)
    conclude(figures, missed(figures))


if __name__ == "__main__":
    main()
