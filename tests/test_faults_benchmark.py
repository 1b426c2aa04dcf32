"""benchmarks/faults.py at its cheapest: two of its rows, and what it calls lost."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import faults, faults_run
from benchmarks.faults_run import Fault, Scene


def test_rows_are_told_apart_by_their_names() -> None:
    assert len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS) >= 40
    assert all(fault.says or fault.codes == (0,) for fault in faults.FAULTS)


@pytest.mark.parametrize("name", ["unknown ascend key", "ascend is no block"])
def test_a_fault_that_is_survived(assets: Path, tmp_path: Path, name: str) -> None:
    (fault,) = faults.chosen(f"^{name}\\n")
    (tmp_path / "assets").symlink_to(assets)
    (tmp_path / "runs").mkdir()
    outcome = faults_run.run(replace(fault, whole=()), tmp_path, patience=4)  # nothing has been trained here
    assert (outcome.state, outcome.problems, outcome.code) == ("survived", (), 2)


def test_what_is_lost_is_named(tmp_path: Path) -> None:
    output = tmp_path / "output"
    (output / "checkpoint-1").mkdir(parents=True)
    (output / "checkpoint-1" / "trainer_state.json").write_text("{}")
    saved = faults_run.checkpoints(output)
    (output / "checkpoint-1" / "trainer_state.json").write_text("{ }")
    (tmp_path / "log").write_text("the disk\nis full")
    fault = Fault("a", "b", ("disk is full", "which disk"), (1, 2), whole=(1, 2))
    with contextlib.ExitStack() as undo:
        scene = Scene(tmp_path, {"output_dir": str(output)}, {}, [], tmp_path / "recipe.yaml", undo)
        found = list(faults_run.judge(fault, scene, 0, saved))
    assert found[:3] == [
        "exit code 0 instead of 1 or 2",
        "nothing says `which disk`",
        "1 saved files changed or gone, first trainer_state.json",
    ]
    assert found[3].startswith("checkpoint-1: ") and found[4:] == ["checkpoint-2: not there"]
