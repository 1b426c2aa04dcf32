"""How far `llamafactory-ascend estimate` is off: from the simulated NPU, and from what real runs reported.

    python benchmarks/memory_estimate.py [--only WORDS] [--work FOLDER]

The trainings of `memory_cases.py` go through stock `llamafactory-cli train` with the plugin on the simulated
NPU, and their peaks of requested bytes (the highest of any rank) are compared with the estimates. SiLU's
backward is computed in parts there, whose results are charged; so these estimates go through it in parts too
(`memory_estimates.py`). Published figures are of stock, and their estimates have its shards of FSDP2.
Progress goes to stderr; the last line of stdout is JSON. The exit code is 1 where a requirement of REQUIRED
is missed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # when run by its path

from benchmarks.measuring import ROOT, conclude, console, parser, working
from benchmarks.memory_cases import CASES, SIDE, write_data
from benchmarks.memory_published import PUBLISHED, write_models
from tests.assets import build
from tests.running import Train

REQUIRED = {"median_error": 0.03, "worst_error": 0.10, "published_worst_error": 0.10}
ROUNDING = "allocator rounding"


class Estimator:
    """A process that estimates; see `memory_estimates.py`."""

    def __init__(self) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "memory_estimates.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __call__(self, words: list[str], cards: int, simulated: bool) -> dict[str, Any]:
        options = {"cards": cards, "memory": 64 << 30, "images": None, "fits": False}
        assert self.process.stdin and self.process.stdout
        job = {"options": options, "words": words, "simulated": simulated}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        if "error" in found:
            raise SystemExit(f"{' '.join(words)}: {found['error']}")
        return found


@contextmanager
def estimator() -> Iterator[Estimator]:
    """Run an estimator for a while."""
    found = Estimator()
    try:
        yield found
    finally:
        assert found.process.stdin
        found.process.stdin.close()
        found.process.wait()


def requested(phases: Mapping[str, Mapping[str, int]]) -> int:
    """Return the most bytes that any phase asks for, without the allocator's rounding."""
    return max(sum(held.values()) - held.get(ROUNDING, 0) for held in phases.values())


def compare(name: str, estimate: Estimator, assets: Path, work: Path) -> float:
    """Run one training and estimate it; return the relative error of the estimate."""
    case = {"dataset": "long", "bf16": True, "max_steps": 2, "image_max_pixels": SIDE**2, **CASES[name]}
    ranks = case.pop("ranks", 1)
    folder = Path(tempfile.mkdtemp(dir=work))
    train = Train(assets, folder, simulator_missing=None)
    data = str(work / "data")
    case |= {"dataset_dir": data, "media_dir": data}
    result = train(ranks=ranks, timeout=1800, **case)
    if result.code:
        raise SystemExit(f"{name}: llamafactory-cli ended with {result.code}:\n{result.text[-4000:]}")
    measured = max(result.peak(rank) for rank in range(ranks))
    recipe = folder / "estimated.yaml"
    nowhere = str(folder / "nowhere")  # an estimate does not go on with what the training left
    recipe.write_text(yaml.safe_dump({**train.recipe(**case), "output_dir": nowhere}), encoding="utf-8")
    estimated = requested(estimate([str(recipe)], ranks, True)["phases"])
    error = estimated / measured - 1
    console.print(f"{name}: {measured:,} B measured, {estimated:,} B estimated, {error:+.2%}")
    return error


def compare_published(estimate: Estimator, work: Path) -> list[float]:
    """Estimate what real runs reported; return the relative errors."""
    write_models(work)
    errors = []
    for name, figure in PUBLISHED.items():
        estimated = figure.estimate(estimate, work)
        nearest = min(max(estimated, figure.low), figure.high)
        errors.append(estimated / nearest - 1)
        console.print(
            f"{name}: {figure.low / figure.unit:.2f} to {figure.high / figure.unit:.2f} published, "
            f"{estimated / figure.unit:.2f} estimated, {errors[-1]:+.2%}"
        )
    return errors


def main() -> None:
    given = parser("How far estimates of memory are off.")
    given.add_argument("--only", default="", help="those whose name has these words (all)")
    options = given.parse_args()
    with working(options.work) as work:
        os.environ["NPROC_PER_NODE"] = ""
        assets = work / "assets"
        build(assets, ["qwen3b", "qwen3_5_big", "vlm"])
        write_data(work / "data")
        with estimator() as estimate:
            names = [name for name in CASES if options.only in name]
            errors = [abs(compare(name, estimate, assets, work)) for name in names]
            published = [abs(error) for error in compare_published(estimate, work)]
    figures = {
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(max(errors), 4),
        "published_worst_error": round(max(published), 4),
    }
    missed = [
        f"{key} is {figures[key]}, required is <= {limit}"
        for key, limit in REQUIRED.items()
        if figures[key] > limit
    ]
    conclude({**figures, "trainings": len(errors), "measured": "simulated NPU; meta device"}, missed)


if __name__ == "__main__":
    main()
