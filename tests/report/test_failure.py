"""Each way a run can fail, for real: phase, cause, bytes. Memory runs out on the simulated NPU."""

import ast
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llamafactory_ascend.report import files
from llamafactory_ascend.report.failure import INNER, OUTER, Mark, describe, phase_of
from tests.running import Train, environment

GAUNTLET = Path(__file__).parent / "gauntlet.py"


@dataclass(frozen=True)
class Gauntlet:
    """What came of each scenario: what the caller saw, the report, and all that was printed."""

    outcomes: dict[str, Any]
    reports: dict[str, dict[str, Any]]
    text: str


@pytest.fixture(scope="module")
def gauntlet(train_once: Train) -> Gauntlet:
    if train_once.simulator_missing:
        pytest.skip(train_once.simulator_missing)
    recipe = train_once.folder / "recipe.json"
    recipe.write_text(json.dumps(train_once.recipe(max_steps=2, max_samples=8, overwrite_cache=True)))
    output = train_once.folder / "reports"
    done = subprocess.run(
        [sys.executable, str(GAUNTLET), str(recipe), str(output)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    outcomes = json.loads((output / "outcomes.json").read_text())
    reports = {path.parent.name: files.read(path) for path in output.glob(f"*/{files.NAME}")}
    return Gauntlet(outcomes, reports, done.stdout)


# scenario, what run_exp raised, phase, last step, type
# fmt: off
FAILURES = [
    ("tokenizer", "OSError", "loading", 0, "OSError"),
    ("load", "OSError", "loading", 0, "OSError"),
    ("dataset", "DatasetGenerationError", "dataset", 0, "DatasetGenerationError"),
    ("oom_loading", "OutOfMemoryError", "loading", 0, "OutOfMemoryError"),
    ("oom_forward", "OutOfMemoryError", "forward", 1, "OutOfMemoryError"),
    ("oom_backward", "OutOfMemoryError", "backward", 1, "OutOfMemoryError"),
    ("oom_recompute", "OutOfMemoryError", "recompute", 1, "OutOfMemoryError"),
    ("oom_reentrant", "OutOfMemoryError", "recompute", 1, "OutOfMemoryError"),
    ("oom_optimizer", "OutOfMemoryError", "optimizer", 0, "OutOfMemoryError"),
    ("oom_evaluation", "OutOfMemoryError", "evaluation", 1, "OutOfMemoryError"),
    ("oom_saving", "OutOfMemoryError", "saving", 2, "OutOfMemoryError"),
    ("chained", "ValueError", "forward", 1, "ValueError"),
    ("chained_silently", "RuntimeError", "forward", 1, "RuntimeError"),
    ("old_torch_npu", "RuntimeError", "forward", 1, "RuntimeError"),
    ("callback", "ZeroDivisionError", "callback", 1, "ZeroDivisionError"),
    ("interrupt", "KeyboardInterrupt", "callback", 1, "KeyboardInterrupt"),
    ("exit", "SystemExit", "callback", 1, "SystemExit"),
    ("saving", "OSError", "saving", 2, "OSError"),
    ("checkpoint", "OSError", "saving", 1, "OSError"),
    ("evaluation", "ValueError", "evaluation", 2, "ValueError"),
]
# fmt: on
OUT_OF_MEMORY = [row[0] for row in FAILURES if row[4] == "OutOfMemoryError"]
OUT_OF_MEMORY += ["chained", "chained_silently", "old_torch_npu"]


@pytest.mark.parametrize(
    ("name", "outcome", "phase", "step", "kind"), FAILURES, ids=[row[0] for row in FAILURES]
)
def test_phase(gauntlet: Gauntlet, name: str, outcome: str, phase: str, step: int, kind: str) -> None:
    report = gauntlet.reports[name]
    (failure,) = report["failures"]
    assert gauntlet.outcomes[name] == outcome
    assert (failure["phase"], failure["step"], failure["type"]) == (phase, step, kind), failure["traceback"]
    assert (report["state"], report["last_step"], report["ended_ranks"]) == ("failed", step, [0])
    assert report["explanation"].startswith(f"rank 0 failed in {phase} ")
    assert kind in failure["traceback"].rstrip().splitlines()[-1]


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_out_of_memory_says_how_much_there_was(gauntlet: Gauntlet, name: str) -> None:
    (failure,) = gauntlet.reports[name]["failures"]
    memory = failure["memory"]
    assert failure["out_of_memory"] and memory["reserved"] >= memory["allocated"]
    assert memory["peak_allocated"] >= memory["allocated"]
    if name != "oom_loading":
        assert memory["allocated"] > 2_000_000  # the weights at least
    where = f"out of device memory in {failure['phase']} after step {failure['step']}"
    line = f"{where}: {memory['allocated']:,} bytes"
    assert line in gauntlet.text


@pytest.mark.parametrize("name", [row[0] for row in FAILURES if row[0] not in OUT_OF_MEMORY])
def test_other_failures_are_not_for_lack_of_memory(gauntlet: Gauntlet, name: str) -> None:
    (failure,) = gauntlet.reports[name]["failures"]
    assert not failure["out_of_memory"] and failure["memory"] is None


def test_the_cause_of_a_chained_exception_is_named(gauntlet: Gauntlet) -> None:
    (failure,) = gauntlet.reports["chained"]["failures"]
    assert failure["headline"].startswith("the layer broke (caused by OutOfMemoryError: NPU out of memory")


def test_a_refusal_says_why(gauntlet: Gauntlet) -> None:
    report = gauntlet.reports["refused"]
    assert gauntlet.outcomes["refused"] == "AscendError"
    assert (report["state"], report["last_step"]) == ("refused", 0)
    assert report["explanation"].startswith(
        "activations would be recomputed twice: `FSDP_ACTIVATION_CHECKPOINTING"
    )
    assert report["failures"][0]["phase"] == "arguments"


def test_an_evaluation_alone_is_a_run(gauntlet: Gauntlet) -> None:
    report = gauntlet.reports["eval_only"]
    assert (gauntlet.outcomes["eval_only"], report["state"], report["explanation"]) == (
        "returned",
        "completed",
        "",
    )
    assert report["ranks"][0]["memory"]["peak_allocated"] > 2_000_000


def test_a_run_knows_nothing_of_those_before_it(gauntlet: Gauntlet) -> None:
    report = gauntlet.reports["completed"]
    assert (gauntlet.outcomes["completed"], report["state"], report["last_step"]) == (
        "returned",
        "completed",
        2,
    )
    assert report["failures"] == [] and report["finished"] >= report["started"]
    assert report["decisions"]["checkpointing"]["reason"] == "`ascend.checkpointing: full`"
    assert gauntlet.reports["oom_reentrant"]["decisions"]["checkpointing"]["choice"] == "left to the host"
    assert report["ranks"][0]["checkpointing"]["checkpointed"] == {"text": 1}
    assert len({found["run"] for found in gauntlet.reports.values()}) == len(gauntlet.reports)


def test_one_table_for_each_run_and_one_hook_for_all(gauntlet: Gauntlet) -> None:
    assert gauntlet.outcomes["one excepthook"]
    assert len(gauntlet.reports) == 23
    for name in gauntlet.reports:
        assert gauntlet.text.count(f"/{name}/{files.NAME}\n") == 1, name


@pytest.mark.parametrize("mark", [*OUTER, *INNER], ids=lambda mark: f"{mark[0]} {mark[2]}")
def test_each_mark_names_a_function_that_exists(mark: Mark) -> None:
    """Against the installed versions: a phase whose function has been renamed would never be found again."""
    _, functions, file = mark
    package = {"trainer.py": "llamafactory/train/dpo/trainer.py"}.get(file, file)
    spec = importlib.util.find_spec(package.split("/")[0])
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]).parent / package
    names = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    assert functions <= names


def test_an_endless_chain_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert phase_of(first) == "other"
    assert describe(first, 0, 0, "cpu")["type"] == "ValueError"


def test_an_exception_without_words_or_place() -> None:
    found = describe(KeyboardInterrupt(), 2, 7, "cpu")
    assert (found["rank"], found["step"], found["headline"], found["where"]) == (2, 7, "", "")
