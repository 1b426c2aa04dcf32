"""Whole runs of the stock command: killed, failed, refused, on one rank and on two of the simulated NPU."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamafactory_ascend.checks import finished_run
from llamafactory_ascend.launching import lock
from llamafactory_ascend.report import files
from tests.report import saboteur
from tests.running import BIN, Result, Train, environment


@pytest.fixture(scope="module")
def sabotaged(train_once: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """``sabotaged(kind, **recipe)`` runs the command with the saboteur."""
    env = saboteur.install(tmp_path_factory.mktemp("saboteur"))

    def run(kind: str, **changes: Any) -> Result:
        return train_once(env={**env, "SABOTAGE": kind}, max_samples=16, **changes)

    return run


@pytest.fixture
def start(train: Train, tmp_path: Path) -> Callable[..., tuple[subprocess.Popen[bytes], Path]]:
    """``start(signal, output)`` lets a run go to step 3, sends the signal, returns (process, output)."""

    if train.simulator_missing:
        pytest.skip(train.simulator_missing)

    def run(number: int, output: Path) -> tuple[subprocess.Popen[bytes], Path]:
        env = saboteur.install(tmp_path)
        path = tmp_path / "recipe.yaml"
        path.write_text(
            yaml.safe_dump(train.recipe(max_steps=500, output_dir=str(output)), allow_unicode=True)
        )
        process = subprocess.Popen(
            [str(BIN / "llamafactory-cli"), "train", str(path)],
            env={**environment(), **env, "SABOTAGE": "slow", "USE_RAY": "0"},  # Ray is imported, not used
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while files.read(output / files.NAME).get("last_step", 0) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        process.wait(100)
        return process, output

    return run


Start = Callable[..., tuple[subprocess.Popen[bytes], Path]]


def test_a_killed_run_says_how_far_it_came(start: Start, tmp_path: Path) -> None:
    output = tmp_path / "输出 dir"
    output.mkdir()
    old = {"run": "old", "started": "2026-01-02T03:04:05+00:00", "state": "completed"}
    (output / files.NAME).write_text(json.dumps(old))
    process, _ = start(signal.SIGKILL, output)
    report = files.read(output / files.NAME)
    assert process.returncode == -signal.SIGKILL
    assert (report["state"], report["last_step"], report["max_steps"]) == ("unfinished", 3, 500)
    assert report["explanation"].startswith("No process has finished this report")
    assert report["finished"] is None and report["ended_ranks"] == []
    assert files.read(output / "ascend_report.2026-01-02T030405+0000.json") == old
    assert [path.name for path in output.glob(".ascend*")] == [".ascend_run.lock"]  # free to take
    verdict = finished_run.check(output, lock.this_process("", ""), time.time())
    assert (verdict.state, verdict.exit_code, verdict.step, verdict.max_steps) == ("unfinished", None, 3, 500)
    assert verdict.problems[0] == ("no exit code: nobody has said how the run ended, after step 3 of 500")
    assert verdict.problems[1].endswith("the run was killed")
    (warning,) = verdict.warnings
    assert warning.startswith(f"{output}/.ascend_run.lock was left behind by host ")
    assert f"pid {process.pid}, " in warning


def test_an_interrupted_run_keeps_its_exit_code(start: Start, tmp_path: Path) -> None:
    process, output = start(signal.SIGINT, tmp_path / "out")
    report = files.read(output / files.NAME)
    assert process.returncode == -signal.SIGINT  # 130 in a shell, as without the plugin
    assert (report["state"], report["last_step"]) == ("stopped", 4)  # the step it was in, which is saved
    assert report["failures"][0]["type"] == "KeyboardInterrupt"


def test_a_refused_run_says_why(sabotaged: Callable[..., Result]) -> None:
    result = sabotaged("refuse")
    assert result.code == 1 and result.report["state"] == "refused"
    assert result.report["explanation"] == "this plugin does not like the recipe\n  next: take another"
    # No frames, which would look like a crash; the table last: the end of the log is the summary.
    said = "[llamafactory-ascend] this plugin does not like the recipe\n  next: take another\n"
    assert "Traceback" not in result.text
    assert 0 < result.text.find(said) < result.text.rfind("llamafactory-ascend: refused")
    command = result.report["process"]["command"]
    assert command[-2] == "train" and command[-1].endswith(".yaml")


def test_an_exit_in_an_evaluation_keeps_its_code_and_is_no_success(sabotaged: Callable[..., Result]) -> None:
    result = sabotaged("exit", max_steps=2, do_eval=True, eval_dataset="tiny")
    assert result.code == 3 and result.report["state"] == "failed"
    (failure,) = result.report["failures"]
    assert (failure["phase"], failure["type"], failure["step"]) == ("evaluation", "SystemExit", 2)
    assert result.report["ranks"][0]["saboteur"] == {"loss": "NaN"}  # strict JSON, whatever a plugin returns


def test_a_broken_report_hook_is_a_finding(sabotaged: Callable[..., Result]) -> None:
    result = sabotaged("report", max_steps=1)
    assert (result.code, result.report["state"]) == (0, "completed")
    (finding,) = [found for found in result.report["findings"] if "saboteur" in found["message"]]
    assert "ascend_report_sections failed: ZeroDivisionError: no section today" in finding["message"]
    assert result.report["ranks"][0]["memory"]["peak_allocated"] > 0
    assert result.text.count("llamafactory-ascend: completed") == 1
    assert result.report["device"]["simulated"] and result.report["device"]["type"] == "npu"
    assert result.report["versions"]["cann"] == "8.5.0"
    assert {patch["state"] for patch in result.report["patches"]} <= {"hit", "verified", "planned", "skipped"}


def test_memory_that_runs_out_on_rank_1(sabotaged: Callable[..., Result]) -> None:
    result = sabotaged("memory:1", ranks=2)
    report = result.report
    assert result.code == 1 and report["state"] == "failed"
    first = report["failures"][0]
    assert (first["rank"], first["phase"], first["step"]) == (1, "backward", 2), first["traceback"]
    assert first["memory"]["allocated"] > 2_000_000
    assert report["explanation"].startswith(
        "rank 1 failed in backward after step 2: OutOfMemoryError: NPU out"
    )
    assert report["launcher"]["exit_code"] == 1 and "torchrun ended with exit code 1" in report["explanation"]
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1] and report["patch_differences"] == []
    assert result.text.count("llamafactory-ascend: failed") == 1


def test_a_rank_that_is_killed(sabotaged: Callable[..., Result]) -> None:
    result = sabotaged("kill:1", ranks=2)
    report = result.report
    assert result.code == 1 and report["state"] == "failed"
    assert 1 in report["launcher"]["unfinished_ranks"] and 1 not in report["ended_ranks"]
    assert report["last_step"] == 2
    assert report["explanation"].startswith("killed or lost after step 2: rank 1; then rank 0 failed in ")
    line = "[llamafactory-ascend] lost: rank 1, after step 2; other failures may follow from it\n"
    assert result.text.count(line) == 1
    assert result.text.count("llamafactory-ascend: failed") == 1
