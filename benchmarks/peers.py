"""Memory and launches beside stock and two peers, on the simulated NPU.

    python benchmarks/peers.py [--work FOLDER] [--venv FOLDER] [--only CASE]

Stock `llamafactory-cli train`, Transformers' Trainer with PEFT, ms-swift 4.6.0 and the plugin train the
cases of `cases.py`, each in a process of its own, all in this invocation. Peaks are the bytes requested
from the simulated device, launches the operators sent to it in three steps, copies, synchronisations and the
plugin's comparisons in the first step included; neither is a figure of real hardware. Progress goes to
stderr; the last line of stdout is JSON. The exit code is 1 where a requirement of REQUIRED is missed or
losses differ.
"""

import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # when run by its path

from benchmarks import peers_swift
from benchmarks.cases import CASES, Case, build_assets
from benchmarks.measuring import (
    Measured,
    conclude,
    console,
    measure_host,
    measure_trainer,
    parser,
    working,
)

# Figures that must not be above these. Launches are required of the text case alone: there the operators that
# the plugin replaces are most of a step. A step of the dense models is matrix products, which it leaves as
# they are.
REQUIRED = {"text_peak": 0.98, "vlm_peak": 0.9, "vocab_peak": 0.6, "launches": 0.5}
ROUNDING = 2e-3  # relative; half the distance of two bfloat16 numbers
OURS, EXACT = "plugin", "plugin, exact"


def measure_case(case: Case, assets: Path, work: Path, swift: Path) -> dict[str, Measured]:
    """Measure all programs on a case."""
    host = {**case.host(), "dataset_dir": str(assets / case.folder)}

    def run_host(name: str, **how: Any) -> Measured:
        return measure_host(assets, work / f"{case.name} {name}", host, **how)

    programs = {
        "stock": lambda: run_host("stock", plugin=False),
        EXACT: lambda: run_host("exact", ascend={"kernels": "off", "loss": "off"}),
        OURS: lambda: run_host("plugin", ascend={"kernels": "auto"}),
        "Trainer": lambda: measure_trainer(case.name, assets, work),
    }
    for setting, words in peers_swift.SETTINGS.items():
        programs[f"ms-swift {setting}"] = lambda name=setting, words=words: peers_swift.measure(  # type: ignore[misc]
            swift, case, assets, work / f"{case.name} {name}", *words
        )
    found = {}
    for name, program in programs.items():
        with console.status(f"{case.name}: {name}"):
            found[name] = program()
        console.print(f"{case.name:6} {name:32} {found[name]}")
    return found


def compare(case: Case, runs: dict[str, Measured]) -> dict[str, Any]:
    """Return the figures of a case: the plugin over the best of the others, for each figure anew."""
    others = [run for name, run in runs.items() if name not in (OURS, EXACT)]
    ours, exact, stock = runs[OURS], runs[EXACT], runs["stock"]
    return {
        f"{case.name}_peak": round(ours.peak / min(run.peak for run in others), 4),
        f"{case.name}_launches": round(ours.launches / min(run.launches for run in others), 4),
        f"{case.name}_losses_equal": (exact.losses, exact.grad_norms) == (stock.losses, stock.grad_norms)
        and all(map(is_rounding, ours.losses, stock.losses)),
    }


def is_rounding(found: float, wanted: float) -> bool:
    return math.isclose(found, wanted, rel_tol=ROUNDING)


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Return the last line: the figures that are required first."""
    figures = {key: found[key] for key in REQUIRED if key in found}
    if "text_launches" in found:
        figures["launches"] = found["text_launches"]
    equal = all(value for key, value in found.items() if key.endswith("_losses_equal"))
    rest = {key: value for key, value in found.items() if not key.endswith("_losses_equal")}
    return {**figures, "losses_equal": equal, **rest}


def missed(figures: dict[str, Any]) -> list[str]:
    """Return a sentence for each requirement that the figures miss."""
    lines = [
        f"{key} is {figures[key]}, required is <= {limit}"
        for key, limit in REQUIRED.items()
        if key in figures and figures[key] > limit
    ]
    return lines if figures["losses_equal"] else [*lines, "losses differ from stock's"]


def main() -> None:
    options = parser("Memory and launches beside peers, on the simulated NPU.")
    options.add_argument(
        "--venv", type=Path, help="folder for ms-swift's environment, some 240 MB (default: in --work)"
    )
    options.add_argument("--only", choices=[case.name for case in CASES], help="one case")
    given = options.parse_args()
    found: dict[str, Any] = {}
    with working(given.work) as work:
        with console.status("ms-swift's environment"):
            swift = peers_swift.make_environment((given.venv or work / "ms-swift").resolve())
        build_assets(work / "assets")
        for case in CASES:
            if given.only in (None, case.name):
                found |= compare(case, measure_case(case, work / "assets", work, swift))
    figures = summarise(found)
    conclude(figures, missed(figures))


if __name__ == "__main__":
    main()
