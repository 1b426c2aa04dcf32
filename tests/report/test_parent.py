"""What the launcher says for ranks that no longer can."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llamafactory_ascend.report import files, parent

# fmt: off
REPORT: dict[str, Any] = {
    "last_step": 3, "state": "unfinished", "explanation": "", "run": "", "world_size": 4, "max_steps": 9,
    "failures": [], "ended_ranks": [2], "launcher": None, "ranks": [], "patches": [], "patch_differences": [],
    "decisions": {}, "findings": [], "device": {"name": "Ascend910B3", "simulated": True},
}
# fmt: on


def torchrun(folder: Path, **facts: Any) -> None:
    """Write what the ranks would, and end as torchrun does."""
    name = os.environ["LLAMAFACTORY_ASCEND_RUN"]
    files.update(folder, lambda _: {**REPORT, "run": f"{name}.0.1", **facts})
    raise subprocess.CalledProcessError(1, ["torchrun"])


def test_the_report_of_a_dead_run_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMAFACTORY_ASCEND_RUN", "another")
    with pytest.raises(subprocess.CalledProcessError), parent.watch({"output_dir": str(tmp_path)}):
        torchrun(tmp_path)
    found = files.read(tmp_path / files.NAME)
    assert (found["state"], found["launcher"]["exit_code"]) == ("failed", 1)
    assert found["launcher"]["unfinished_ranks"] == [0, 1, 3]
    assert found["explanation"] == (
        "killed or lost after step 3: rank 0-1,3; torchrun ended with exit code 1"
    )
    said = capsys.readouterr().err
    assert "llamafactory-ascend: failed" in said
    line = "[llamafactory-ascend] lost: rank 0-1,3, after step 3; other failures may follow from it\n"
    assert said.startswith(line)


def test_each_node_adds_the_ranks_that_it_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.update(tmp_path, lambda _: {**REPORT, "run": "first+second.0.1"})
    nodes = {"NNODES": "2", "NPROC_PER_NODE": "2"}
    parent.close(tmp_path, "second", 1, {**nodes, "NODE_RANK": "1"})
    assert files.read(tmp_path / files.NAME)["launcher"]["unfinished_ranks"] == [3]
    said = capsys.readouterr().err
    assert "lost: rank 3, after step 3" in said
    assert "llamafactory-ascend: failed" not in said  # rank 0 is not lost yet, nor of this node
    parent.close(tmp_path, "first", 1, {**nodes, "NODE_RANK": "0"})
    found = files.read(tmp_path / files.NAME)
    assert found["explanation"].startswith("killed or lost after step 3: rank 0-1,3;")
    assert "llamafactory-ascend: failed" in capsys.readouterr().err


def test_the_launcher_prints_the_table_of_a_rank_0_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMAFACTORY_ASCEND_RUN", "another")
    with pytest.raises(subprocess.CalledProcessError), parent.watch({"output_dir": str(tmp_path)}):
        torchrun(tmp_path, ended_ranks=[0, 1, 2, 3])
    assert files.read(tmp_path / files.NAME)["state"] == "failed"
    assert capsys.readouterr().err.count("llamafactory-ascend: failed") == 1


def test_an_older_report_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAFACTORY_ASCEND_RUN", "another")
    files.update(tmp_path, lambda _: {**REPORT, "run": "old.0.1", "state": "completed"})
    with pytest.raises(subprocess.CalledProcessError), parent.watch({"output_dir": str(tmp_path)}):
        raise subprocess.CalledProcessError(1, ["torchrun"])
    assert files.read(tmp_path / files.NAME)["state"] == "completed"


def test_a_folder_that_never_was_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAFACTORY_ASCEND_RUN", "another")
    with pytest.raises(KeyboardInterrupt), parent.watch({"output_dir": str(tmp_path / "x")}):
        raise KeyboardInterrupt
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("recipe", "folder"),
    [
        ({"output_dir": "~/out"}, Path.home() / "out"),
        (["--stage", "sft", "--output_dir", "中 文"], Path("中 文")),
        (["--output_dir=a b", "--stage=sft"], Path("a b")),
        (["--output-dir", "a", "--stage=sft", "--output_dir=b"], Path("b")),  # the last one counts
        (["--stage", "sft"], None),
        ({}, None),
    ],
)
def test_output_dir(recipe: Any, folder: Path | None) -> None:
    assert parent.output_dir(recipe) == folder


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, {0, 1, 2, 3}),
        ({"NNODES": "2", "NPROC_PER_NODE": "2", "NODE_RANK": "1"}, {2, 3}),
        ({"NNODES": "2", "NPROC_PER_NODE": "2", "RDZV_ID": "job"}, {0, 1, 2, 3}),
    ],
)
def test_local_ranks(environ: dict[str, str], ranks: set[int]) -> None:
    assert parent.local_ranks(4, environ) == ranks
