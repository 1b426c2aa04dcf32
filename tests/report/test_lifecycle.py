"""The report of one process: what it survives, what it keeps, what it leaves to others."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamafactory_ascend.report import files, lifecycle
from llamafactory_ascend.run import Arguments, Run


def make_run(folder: Path, do_train: bool = True) -> Run:
    training = SimpleNamespace(output_dir=str(folder), do_train=do_train, device=SimpleNamespace(type="npu"))
    return Run(arguments=Arguments(None, None, training, None, None))


def make_report(folder: Path, key: str = "run.0.1", step: int = 0) -> lifecycle.Report:
    report = lifecycle.Report(make_run(folder), folder, key, {})
    report.state = SimpleNamespace(global_step=step)
    return report


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank))


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The warnings of the plugin; its logger does not propagate."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    listener = Listener()
    logger = logging.getLogger("llamafactory_ascend")
    logger.addHandler(listener)
    yield lines
    logger.removeHandler(listener)


def read(folder: Path) -> dict[str, Any]:
    return files.read(folder / files.NAME)


def test_steps_go_by_without_the_file_being_written_anew(tmp_path: Path) -> None:
    report = make_report(tmp_path)
    report.write()
    inode = (tmp_path / files.NAME).stat().st_ino
    for step in range(1, 200):
        report.state.global_step = step
        report.beat()
        assert read(tmp_path)["last_step"] == step
    assert (tmp_path / files.NAME).stat().st_ino == inode


def test_the_whole_report_is_written_when_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "FULL_WRITE_SECONDS", 0.0)
    report = make_report(tmp_path)
    report.write()
    report.run.find("note", "data", "three rows are empty")
    report.beat()
    assert read(tmp_path)["findings"][0]["message"] == "three rows are empty"


def test_a_folder_that_cannot_be_made_is_said_once(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "out"
    report = make_report(folder)
    report.write()
    for _ in range(100):
        report.beat()
    report.finish()
    assert len(said) == 1 and "cannot be written, training goes on: NotADirectoryError" in said[0]
    (tmp_path / "file").unlink()  # the disk comes back
    monkeypatch.setattr(lifecycle, "RETRY_SECONDS", 0.0)
    report.write()
    assert read(folder)["state"] == "unfinished"


def test_a_run_that_lost_its_folder_to_another_leaves_it_alone(tmp_path: Path, said: list[str]) -> None:
    ours, theirs = make_report(tmp_path, "ours", step=3), make_report(tmp_path, "theirs")
    ours.write()
    theirs.write()
    ours.beat()
    ours.fail(ValueError("late"))
    assert (read(tmp_path)["run"], read(tmp_path)["failures"]) == ("theirs", [])
    assert len(said) == 1 and "another run has started in" in said[0]
    (kept,) = tmp_path.glob("ascend_report.2*.json")
    assert files.read(kept)["run"] == "ours"


def test_a_failure_that_comes_before_rank_0_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_report(tmp_path, "an older run").write()
    on_rank(monkeypatch, 1)
    make_report(tmp_path).fail(ValueError("early"))
    on_rank(monkeypatch, 0)
    first = make_report(tmp_path)
    first.write(max_steps=9)
    found = read(tmp_path)
    assert (found["state"], found["max_steps"], found["ended_ranks"]) == ("failed", 9, [1])
    assert found["explanation"] == "rank 1 failed in other before the first step was done: ValueError: early"
    assert len(list(tmp_path.glob("ascend_report.2*.json"))) == 1


def test_rank_0_never_covers_the_failure_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_report(tmp_path, step=4), make_report(tmp_path, step=5)
    first.write()
    on_rank(monkeypatch, 1)
    second.fail(ValueError("rank 1 only"))
    on_rank(monkeypatch, 0)
    first.beat()
    first.finish()
    found = read(tmp_path)
    assert (found["state"], found["last_step"], found["ended_ranks"]) == ("failed", 5, [0, 1])
    assert [failure["rank"] for failure in found["failures"]] == [1]


def test_other_ranks_write_only_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_rank(monkeypatch, 1)
    report = make_report(tmp_path, step=1)
    report.write()
    report.beat()
    assert list(tmp_path.iterdir()) == []
    report.finish()
    assert (read(tmp_path)["state"], read(tmp_path)["ended_ranks"]) == ("unfinished", [1])


def test_the_first_failure_counts_and_none_after_the_end(tmp_path: Path) -> None:
    report = make_report(tmp_path)
    report.fail(ValueError("first"))
    report.fail(ValueError("second"))
    report.finish()
    assert [failure["message"] for failure in read(tmp_path)["failures"]] == ["first"]
    other = make_report(tmp_path, "other")
    other.finish()
    other.fail(ValueError("of the caller, later"))
    assert read(tmp_path)["state"] == "completed"


def test_a_forked_child_does_not_speak_for_its_parent(tmp_path: Path) -> None:
    report = make_report(tmp_path)
    report.write()
    before = (tmp_path / files.NAME).read_bytes()
    child = os.fork()
    if child == 0:
        report.fail(ValueError("in a data worker"))
        report.trained = True
        report.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / files.NAME).read_bytes() == before


def test_what_the_process_found_before_stays_for_the_next_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.find("warning", "plugin", "plugin `x` is off")
    report = lifecycle.Report(run, tmp_path, "key", {})
    run.find("warning", "data", "of this run")
    run.decide("checkpointing", "full", "asked for")
    run.facts["checkpointing"] = 1
    report.forget()
    assert [finding.message for finding in run.findings] == ["plugin `x` is off"]
    assert run.decisions == {} and run.facts == {}


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.report.test_lifecycle import make_run
from llamafactory_ascend.report import lifecycle
lifecycle.begin(make_run(Path(sys.argv[1]), do_train={do_train}), {{}})
{end}
"""


@pytest.mark.parametrize(
    ("do_train", "end", "state", "code"),
    [
        (True, "raise ValueError('nobody catches this')", "failed", 1),
        (True, "raise KeyboardInterrupt", "failed", -2),
        (True, "pass", "unfinished", 0),
        (True, "import os; os._exit(7)", "unfinished", 7),
        (True, "import os; os.kill(os.getpid(), 15)", "unfinished", -15),
        (True, "lifecycle.finished()", "completed", 0),
        (False, "pass", "completed", 0),
        (
            True,
            "lifecycle.begin(make_run(Path(sys.argv[1] + '2')), {}); lifecycle.finished()",
            "unfinished",
            0,
        ),
    ],
)
def test_the_end_of_a_process(tmp_path: Path, do_train: bool, end: str, state: str, code: int) -> None:
    """Without the host's own function around the run, as a script has it that calls a workflow by hand."""
    root = str(Path(__file__).parents[2])
    program = PROGRAM.format(root=root, do_train=do_train, end=end)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")], stderr=subprocess.PIPE, text=True
    )
    assert (read(tmp_path / "out")["state"], done.returncode) == (state, code), done.stderr
    assert done.stderr.count("llamafactory-ascend: ") == (state != "unfinished" or "begin" in end)
