"""`checkpointing: auto` at three budgets, beside every layer recomputed and none, on the simulated NPU.

    python benchmarks/checkpointing_auto.py [--work FOLDER]

The case is that of `text_case.py`. The budgets lie 30, 50 and 80 % of the way from the peak of `full` to that
of a run without checkpointing, and the simulated device has no byte more, so that a run above its budget ends
with an error. Peaks are allocated bytes, as the run reports them. Each setting runs four and five steps; the
difference is one step after the decision. Launches are the operators sent to the simulated device, copies and
synchronisations included; they are no times, and no figure of real hardware. Progress goes to stderr; the
last line of stdout is JSON. The exit code is 1 where a requirement (``missed``) is not met.
"""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # when run by its path

from benchmarks.measuring import MIB, conclude, console, parser, working
from benchmarks.text_case import MODEL, RECIPE
from tests.assets import build
from tests.running import Train

STEPS = 5  # in the first everything is recomputed, the next two find the number of layers
SHARES = (30, 50, 80)  # percent
NONE = {"disable_gradient_checkpointing": True, "gradient_checkpointing": False}


@dataclass(frozen=True)
class Measured:
    """One setting: peak in allocated bytes, launches of the last step, layers kept, what was logged."""

    peak: int
    launches: int
    kept: int
    logged: tuple[list[float], list[float]]

    def __str__(self) -> str:
        return f"{self.peak / MIB:7.2f} MiB  {self.launches:7,} launches a step  {self.kept:2} layers kept"


def measure_setting(assets: Path, folder: Path, memory: int | None = None, **how: Any) -> Measured:
    """Run a setting twice, on a device of this many MiB."""
    folder.mkdir()
    train = Train(assets, folder, simulator_missing=None)
    env = {"SIM_NPU_MEMORY_MB": str(memory)} if memory else {}
    found = []
    for steps in (STEPS - 1, STEPS):
        result = train(timeout=1800, env=env, **{**RECIPE, "max_steps": steps, **how})
        if result.code:
            raise SystemExit(f"llamafactory-cli ended with {result.code}:\n{result.text[-4000:]}")
        found.append(result)
    rank = found[1].report["ranks"][0]
    return Measured(
        rank["memory"]["peak_allocated"],
        found[1].operators.total() - found[0].operators.total(),
        ((rank["checkpointing"] or {}).get("budget") or {}).get("kept", 0),
        (found[1].losses, found[1].grad_norms),
    )


def measure(work: Path) -> dict[str, Any]:
    """Measure all settings and return the figures."""
    assets = work / "assets"
    with console.status("building the model and the data"):
        build(assets, [MODEL, "data"])
    with console.status("full"):
        full = measure_setting(assets, work / "full")
    console.print(f"full  {full}")
    with console.status("none"):
        none = measure_setting(assets, work / "none", **NONE)
    console.print(f"none  {none}")
    autos, budgets = [], []
    for share in SHARES:
        budgets.append((full.peak + (none.peak - full.peak) * share // 100) // MIB)
        ascend = {**RECIPE["ascend"], "checkpointing": "auto", "memory_budget": f"{budgets[-1]}MiB"}
        with console.status(f"auto at {share} %, {budgets[-1]} MiB"):
            autos.append(measure_setting(assets, work / f"auto{share}", memory=budgets[-1], ascend=ascend))
        console.print(f"{share} %  {autos[-1]}, budget {budgets[-1]} MiB")
    return {
        "full_peak_mib": round(full.peak / MIB, 2),
        "none_peak_mib": round(none.peak / MIB, 2),
        "full_launches": full.launches,
        "none_launches": none.launches,
        "budgets_mib": budgets,
        "peaks_mib": [round(auto.peak / MIB, 2) for auto in autos],
        "launches": [auto.launches for auto in autos],
        "kept": [auto.kept for auto in autos],
        "used": [round(auto.peak / MIB / budget, 4) for auto, budget in zip(autos, budgets, strict=True)],
        "losses_equal": all(run.logged == full.logged for run in (none, *autos)),
    }


def missed(figures: dict[str, Any]) -> list[str]:
    """Return a sentence for each requirement that the figures miss."""
    lines = [f"{used:.2%} of the budget used" for used in figures["used"] if not 0.8 <= used <= 1]
    launches = [figures["full_launches"], *figures["launches"], figures["none_launches"]]
    if any(one <= other for one, other in itertools.pairwise(launches)):
        lines.append(f"launches do not fall from budget to budget: {launches}")
    return (
        lines if figures["losses_equal"] else [*lines, "losses or gradient norms differ from those of `full`"]
    )


def main() -> None:
    given = parser("Layers kept within a budget, on the simulated NPU.").parse_args().work
    with working(given) as work:
        figures = measure(work)
    conclude(figures, missed(figures))


if __name__ == "__main__":
    main()
