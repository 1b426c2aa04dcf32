"""A run is judged by what it has left: a training of the Trainer's own, and what can become of its files."""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamafactory_ascend.checks import run_history
from llamafactory_ascend.cli import app
from llamafactory_ascend.launching import lock
from llamafactory_ascend.report import files
from tests.training import adapted, trainer

REPORT: dict[str, Any] = {
    "schema": 2, "run": "a.0.1", "last_step": 4, "state": "completed", "explanation": "", "max_steps": 4,
    "launcher": None, "findings": [], "ranks": [],
}  # fmt: skip
HOUR = 3600.0


def log(folder: Path, *steps: int, total: int = 4, loss: float = 1.5) -> None:
    """Write the host's log as its callback does."""
    with (folder / run_history.LOG).open("a") as file:
        for step in steps:
            row = {"current_steps": step, "total_steps": total, "loss": loss, "epoch": step / 4}
            file.write(json.dumps(row) + "\n")


def report(folder: Path, **changes: Any) -> None:
    (folder / files.NAME).write_text(json.dumps({**REPORT, **changes}))


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def grow_old(folder: Path) -> None:
    then = time.time() - HOUR
    for file in folder.rglob("*"):
        os.utime(file, (then, then))


def hold(folder: Path, **changes: Any) -> lock.Owner:
    """Leave a lock in a folder: of this process, or of another one."""
    owner = replace(lock.this_process("a", "2026-01-02T03:04:05+00:00"), **changes)
    (folder / lock.NAME).write_text(json.dumps(asdict(owner)))
    return owner


@pytest.fixture(scope="module")
def whole(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA training of four steps that was saved at the second and the fourth, without a report."""
    folder = tmp_path_factory.mktemp("whole")
    made = trainer(adapted(assets / "qwen3_5"), folder, max_steps=4, save_strategy="steps", save_steps=2)
    result = made.train()
    made.save_model()
    made.save_metrics("train", result.metrics)
    made.save_state()
    log(folder, 1, 2, 3, 4, 4)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return shutil.copytree(whole, tmp_path / "out")


def judged(folder: Path) -> dict[str, Any]:
    """Return the verdict as JSON, whose `ok` is also the exit code."""
    done = CliRunner().invoke(app, ["check", "run", str(folder), "--json"])
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == (0 if found["ok"] else 1) and found["ok"] == (not found["problems"])
    return found


@pytest.mark.parametrize("with_report", [False, True])
def test_a_whole_run_with_and_without_a_report(folder: Path, with_report: bool) -> None:
    if with_report:
        report(folder)
    found = judged(folder)
    assert (found["problems"], found["warnings"]) == ([], [])
    assert (found["step"], found["max_steps"]) == (4, 4)
    assert (found["state"], found["exit_code"]) == (("completed", 0) if with_report else ("", None))
    assert found["checkpoint"] == str(folder / "checkpoint-4") and len(found["sha256"]) == 64
    grow_old(folder)
    done = CliRunner().invoke(app, ["check", "run", str(folder)])
    assert done.exit_code == 0 and done.stdout.endswith("\ndone and whole\n")


def test_the_end_of_the_training_without_an_adapter(folder: Path) -> None:
    """Stock with FSDP2: exit code 0, train_results.json, and no model."""
    (folder / "adapter_model.safetensors").unlink()
    (problem,) = judged(folder)["problems"]
    assert problem.endswith("adapter_model.safetensors is missing: no adapter was written")
    (folder / "adapter_config.json").unlink()
    report(folder)
    (problem,) = judged(folder)["problems"]
    assert "neither adapter_model.safetensors nor model*.safetensors: no model was saved; " in problem
    assert problem.endswith(f"{folder}/checkpoint-4 may hold one")


def test_full_weights_are_judged_by_their_headers(folder: Path) -> None:
    weights = (folder / "adapter_model.safetensors").rename(folder / "model.safetensors")
    (folder / "adapter_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    assert judged(folder)["problems"] == []
    weights = weights.rename(folder / "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    (problem,) = judged(folder)["problems"]
    assert problem == f"{index} is missing, without which {weights.name} and its like cannot be loaded"
    for text, said in (
        ({"weight_map": {"lm_head.weight": "x"}}, f"1 of the 1 tensors in {index.name} are missing"),
        ({}, f"{index} cannot be read: `weight_map`: Field required"),
    ):
        index.write_text(json.dumps(text))
        (problem,) = judged(folder)["problems"]
        assert problem.startswith(said)
    index.unlink()
    weights = weights.rename(folder / "model.safetensors")
    for data, said in (
        (weights.read_bytes()[:-9], "was cut off"),
        (b"\4\0\0\0\0\0\0\0null", "is not a safetensors file: its header is none"),
        (b"\2\0\0\0\0\0\0\0{}", "hold no tensor"),
    ):
        weights.write_bytes(data)
        (problem,) = judged(folder)["problems"]
        assert str(folder) in problem and said in problem


def test_fewer_steps_than_were_set_out_for(folder: Path) -> None:
    change(folder / run_history.STATE, max_steps=9)
    assert judged(folder)["problems"] == ["4 of 9 steps were done, although the run came to its end"]
    given_up = {"args": {"early_stopping_patience": 2}, "attributes": {"early_stopping_patience_counter": 2}}
    change(folder / run_history.STATE, stateful_callbacks={"EarlyStoppingCallback": given_up})
    found = judged(folder)
    assert (found["problems"], len(found["warnings"])) == ([], 1)
    assert "early_stopping_steps" in found["warnings"][0]


def test_another_run_in_the_same_folder(folder: Path) -> None:
    log(folder, 1, 2)
    (warning,) = judged(folder)["warnings"]
    assert "trainer_log.jsonl ends at step 2, trainer_state.json at 4" in warning


def dead(folder: Path) -> None:
    """Make it a run that was killed after step 3: with a checkpoint of step 2, and no end."""
    shutil.rmtree(folder / "checkpoint-4")
    for name in (run_history.STATE, "train_results.json", "adapter_model.safetensors", run_history.LOG):
        (folder / name).unlink()
    log(folder, 1, 2, 3)


def test_a_stock_run_that_was_killed(folder: Path) -> None:
    dead(folder)
    found = judged(folder)
    assert (found["step"], found["max_steps"], found["checkpoint"]) == (3, 4, f"{folder}/checkpoint-2")
    assert found["problems"] == [
        "no exit code and no train_results.json, which the host writes at its end: nobody has said how the "
        "run ended, after step 3 of 4"
    ]
    (warning,) = found["warnings"]
    assert warning.endswith("it may still be going")
    grow_old(folder)
    found = judged(folder)
    assert found["warnings"] == []
    assert found["problems"][1] == "trainer_log.jsonl was last written 1:00:00 ago: the run was killed"


def test_a_lock_says_whether_the_run_lives(folder: Path) -> None:
    dead(folder)
    report(folder, state="unfinished", last_step=3)
    hold(folder)
    found = judged(folder)
    (problem,) = found["problems"]
    assert problem.startswith("still going, after step 3 of 4: host ") and found["warnings"] == []
    owner = hold(folder, born=1)
    found = judged(folder)
    ended, since = found["problems"]
    assert ended.startswith("no exit code: nobody has said how") and since.endswith(": the run was killed")
    assert found["warnings"] == [
        f"{folder}/{lock.NAME} was left behind by {lock.who(owner)}: the next launch takes it over"
    ]
    hold(folder, machine="another")
    left, may = judged(folder)["warnings"][::-1]
    assert left.endswith(f"If it does not: rm {folder}/{lock.NAME}") and may.endswith("may still be going")
    hold(folder)
    grow_old(folder)
    (warning,) = judged(folder)["warnings"]
    assert "1:00:00 ago: a step or an evaluation takes that long, or the run hangs" in warning


@pytest.mark.parametrize("state", ["failed", "stopped", "refused"])
def test_what_the_report_says_of_an_end(folder: Path, state: str) -> None:
    dead(folder)
    report(folder, state=state, explanation="why", launcher={"exit_code": 1})
    found = judged(folder)
    assert (found["state"], found["exit_code"], found["problems"]) == (state, 1, [f"{state}: why"])


def damage_optimizer(last: Path) -> str:
    (last / "optimizer.pt").write_bytes(b"PK")
    return "has optimizer.pt cut off"


def damage_adapter(last: Path) -> str:
    file = last / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    return "was cut off"


def damage_weights(last: Path) -> str:
    (last / "adapter_config.json").unlink()
    file = (last / "adapter_model.safetensors").rename(last / "model.safetensors")
    file.write_bytes(file.read_bytes()[:-9])
    return "model.safetensors was cut off"


def damage_state(last: Path) -> str:
    (last / run_history.STATE).unlink()
    return "has no trainer_state.json: the run was killed while it was saved"


@pytest.mark.parametrize("damage", [damage_optimizer, damage_adapter, damage_weights, damage_state])
def test_the_last_checkpoint_is_all_there_or_the_one_before_is_named(
    folder: Path, damage: Callable[[Path], str]
) -> None:
    said = damage(folder / "checkpoint-4")
    (warning,) = judged(folder)["warnings"]  # the run is done, so nothing has to go on from it
    assert said in warning and warning.endswith(f"`resume_from_checkpoint: {folder}/checkpoint-2`")
    (folder / "train_results.json").unlink()
    assert warning in judged(folder)["problems"]


def test_values_that_are_no_numbers(folder: Path) -> None:
    def logged(*rows: dict[str, float]) -> dict[str, Any]:
        entries = [{"step": step, **row} for step, row in enumerate(rows, 1)]
        change(folder / run_history.STATE, log_history=entries)
        return judged(folder)

    good, nan = {"loss": 1.0, "grad_norm": 2.0}, float("nan")
    overflow = {"loss": 1.0, "grad_norm": float("inf")}
    found = logged(overflow, good)  # of a gradient scaler
    assert found["problems"] == [] and found["warnings"] == [
        "grad_norm is not finite at 1 of 2 logged steps, first at step 1"
    ]
    gradient, loss = logged(good, {"loss": 0.0, "grad_norm": nan}, {"loss": 0.0, "grad_norm": nan})[
        "problems"
    ]
    assert gradient == "grad_norm is not finite at 2 of 3 logged steps, first at step 2"
    assert loss.startswith("loss is 0 at 2 of 3 logged steps, first at step 2: ")
    assert len(logged({"loss": nan, "grad_norm": nan})["problems"]) == 2
    assert logged({"loss": 0.0, "grad_norm": 0.1})["problems"] == []  # rounded
    assert logged({"loss": 0.0, "grad_norm": 0.0, "rewards/accuracies": 1.0})["problems"] == []
    (problem,) = logged(good, {"eval_first_loss": nan})["problems"]  # one of several data sets
    assert problem.startswith("eval_first_loss is not finite at 1 of 1 logged steps, first at step 2")


def test_what_the_report_and_the_adapter_disagree_about(folder: Path) -> None:
    error = {"level": "error", "subject": "sharding", "message": "half of it"}
    report(folder, findings=[error], ranks=[{"adapter": {"sha256": "0"}}])
    found = judged(folder)
    assert found["problems"] == ["sharding: half of it"]
    assert found["warnings"] == ["adapter_model.safetensors is not the file that this run saved (sha256 0)"]


@pytest.mark.parametrize("text", ["{", "[]", "\0", "[" * 10_000, '{"state": 1}'], ids=range(5))
def test_a_file_that_is_not_what_it_should_be_is_said_and_nothing_raises(folder: Path, text: str) -> None:
    (folder / files.NAME).write_text(text)
    with (folder / run_history.LOG).open("ab") as file:
        file.write(b"\xff" + text.encode() + b'\n{"current_steps": null, "epoch": 1}\n')
    (folder / lock.NAME).write_text(text)
    (folder / "checkpoint-\N{SUPERSCRIPT TWO}").mkdir()
    found = judged(folder)
    (warning,) = found["warnings"]
    assert warning.startswith(f"{folder}/ascend_report.json cannot be read: ")
    assert warning.endswith(": judged by the host's files alone") and found["problems"] == []
    (folder / run_history.STATE).write_text(text)
    (problem,) = judged(folder)["problems"]
    assert problem.startswith(f"{folder}/trainer_state.json cannot be read: ")
    assert problem.endswith(": what the training logged is lost")


def test_a_report_of_a_newer_version(folder: Path) -> None:
    report(folder, schema=99, more={})
    (warning,) = judged(folder)["warnings"]
    assert "has schema 99" in warning


def test_another_run_in_a_folder_that_a_run_has_stopped_in(folder: Path) -> None:
    report(folder, state="stopped", explanation="why")
    hold(folder)  # of the run that the report is about: its launcher has not ended yet
    assert judged(folder)["warnings"] == []
    hold(folder, run="")  # of plain torchrun, which gives no name
    assert judged(folder)["warnings"] == []
    owner = hold(folder, run="b")
    assert judged(folder)["warnings"] == [f"another run is in {folder}: {lock.who(owner)}"]


def test_a_folder_without_a_run_is_wrong_usage(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["check", "run", str(tmp_path)])
    assert done.exit_code == 2 and "holds nothing" in done.output
    assert CliRunner().invoke(app, ["check", "run", str(tmp_path / "none")]).exit_code == 2
    (tmp_path / "checkpoint-4").mkdir()
    done = CliRunner().invoke(app, ["check", "run", str(tmp_path / "checkpoint-4")])
    assert done.exit_code == 2 and "is a checkpoint" in done.output
    (tmp_path / "checkpoint-4").rmdir()
    (tmp_path / "eval_results.json").write_text("{}")  # an evaluation alone leaves no more than these
    batches, loss = (
        {"current_steps": 60, "total_steps": 64},
        {"current_steps": 0, "total_steps": 64, "epoch": 0},
    )
    lines = [json.dumps(batches), json.dumps(loss), '{"current_st']
    (tmp_path / run_history.LOG).write_text("\n".join(lines))
    assert judged(tmp_path)["problems"] == []
