"""One run per output_dir: who may take the lock, who is refused, and what a refusal says."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.launching import lock, ownership

HOLD = (
    "import sys, time; from pathlib import Path; from llamafactory_ascend.launching import lock\n"
    "lock.take(Path(sys.argv[1]), lock.this_process('other', '2026-01-02T03:04:05+00:00'))\n"
    "print('held', flush=True); time.sleep(60)\n"
)


def me(**changes: Any) -> lock.Owner:
    return replace(lock.this_process("mine", "2026-05-06T07:08:09+00:00"), **changes)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def leave_behind(folder: Path, **changes: Any) -> None:
    """What an owner leaves whom SIGKILL has met."""
    lock.take(folder, me())
    text = json.loads((folder / lock.NAME).read_text())
    (folder / lock.NAME).unlink()
    (folder / lock.NAME).write_text(json.dumps({**text, **changes}))


def gone() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_second_run_is_refused_by_name(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    before = (tmp_path / lock.NAME).read_text()
    with pytest.raises(AscendError) as error:
        lock.take(tmp_path, me())
    assert error.value.what == (
        f"output_dir {tmp_path} is in use by another run: host {me().host}, pid {other.pid}, "
        "started 2026-01-02T03:04:05+00:00"
    )
    assert f"kill {other.pid}" in error.value.hint
    assert (tmp_path / lock.NAME).read_text() == before


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    held = lock.take(tmp_path, me())
    assert held.taken_over is not None and held.taken_over.pid == other.pid
    assert json.loads((tmp_path / lock.NAME).read_text())["run"] == "mine"
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_outlives_its_launcher_still_holds_the_lock(tmp_path: Path) -> None:
    """torchrun gets the file with it: a launcher that is killed must not free what its ranks write to."""
    held = lock.take(tmp_path, me())
    child = subprocess.Popen(["sleep", "60"], pass_fds=(held.handle,))
    os.close(held.handle)  # as its death would
    text = json.loads((tmp_path / lock.NAME).read_text())
    (tmp_path / lock.NAME).write_text(json.dumps({**text, "pid": gone()}))
    with pytest.raises(AscendError, match="process is gone, but one that it started is still at work"):
        lock.take(tmp_path, me())
    child.kill()
    child.wait()
    lock.take(tmp_path, me()).release()


def test_another_machine_cannot_be_judged(tmp_path: Path) -> None:
    leave_behind(tmp_path, host="node7", machine="another boot")
    with pytest.raises(AscendError) as error:
        lock.take(tmp_path, me())
    assert "may be in use by another run: host node7" in error.value.what
    assert "another machine than this one" in error.value.what
    assert error.value.hint == f"make sure that it does not, then: rm {tmp_path}/{lock.NAME}"
    (tmp_path / lock.NAME).unlink()
    lock.take(tmp_path, me()).release()


def test_another_container_on_this_machine_is_judged_by_the_kernel(tmp_path: Path) -> None:
    """Its pid means nothing here, and with `--net=host` its host name is ours."""
    leave_behind(tmp_path, pid=os.getpid(), namespace="pid:[1]")
    held = lock.take(tmp_path, me())
    assert held.taken_over is not None and held.taken_over.namespace == "pid:[1]"
    held.release()


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "is in use by another run"),
        ({"born": 1}, ""),  # another process has its number now
        ({"pid": 0}, ""),
        ({"namespace": "pid:[1]"}, "may be in use by another run.*another container"),
        ({"machine": "another boot"}, "may be in use by another run.*another machine"),
    ],
)
def test_where_files_cannot_be_locked_the_process_is_looked_for(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    leave_behind(tmp_path, **({"pid": gone()} if changes == {"pid": 0} else changes))
    if message:
        with pytest.raises(AscendError, match=message):
            lock.take(tmp_path, me())
        return
    held = lock.take(tmp_path, me())
    assert held.taken_over is not None
    assert json.loads((tmp_path / lock.NAME).read_text())["flock"] is False
    with pytest.raises(AscendError, match="is in use"):
        lock.take(tmp_path, me())
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_come_at_once_one_gets_it(tmp_path: Path) -> None:
    leave_behind(tmp_path, pid=gone())
    start = (
        f"import time; time.sleep(max(0, {os.times().elapsed + 1.5} - __import__('os').times().elapsed))\n"
    )
    code = start + HOLD.replace("time.sleep(60)", "time.sleep(3)")
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    said = [process.communicate()[0] for process in processes]
    assert sorted(said) == [b"", b"", b"", b"held\n"]


def test_a_folder_that_cannot_be_written_is_refused_with_its_errno(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AscendError) as error:
        lock.take(tmp_path / "file" / "out", me())
    assert f"output_dir {tmp_path}/file/out cannot be written: ENOTDIR (errno 20" in error.value.what
    with pytest.raises(AscendError, match="cannot be written: E"):
        lock.take(Path("/proc/out"), me())


def test_a_folder_that_was_made_for_nothing_goes(tmp_path: Path) -> None:
    lock.take(tmp_path / "a", me()).release()
    assert not (tmp_path / "a").exists()
    held = lock.take(tmp_path / "b", me())
    (tmp_path / "b" / "model").touch()
    held.release()
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("environ", "taker"),
    [
        ({}, True),
        ({"NNODES": "2", "NODE_RANK": "0"}, True),
        ({"NNODES": "2", "NODE_RANK": "1"}, False),
        ({"NNODES": "2", "NODE_RANK": "0", "RDZV_ID": "job"}, False),
        ({"NNODES": "1", "RDZV_ID": "job"}, True),
        ({"NNODES": "1", "RDZV_ID": "job", "MAX_NNODES": "4"}, False),
    ],
)
def test_one_launcher_of_a_run_takes_the_lock(environ: dict[str, str], taker: bool) -> None:
    assert ownership.is_takers_turn(environ) == taker


def test_rank_0_takes_what_no_launcher_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ownership.LOCKED, raising=False)
    before = len(ownership.handles())
    with ownership.ending():
        ownership.take_in_rank(tmp_path)
        ownership.take_in_rank(tmp_path)  # a second look at the arguments
        assert (tmp_path / lock.NAME).exists() and os.environ[ownership.LOCKED] == str(tmp_path)
        assert len(ownership.handles()) == before + 1
    assert not (tmp_path / lock.NAME).exists() and ownership.LOCKED not in os.environ
    with ownership.ending():
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("RANK", "1")
        ownership.take_in_rank(tmp_path)
        assert not (tmp_path / lock.NAME).exists()
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv(ownership.LOCKED, str(tmp_path))  # by its launcher
        ownership.take_in_rank(tmp_path)
        assert not (tmp_path / lock.NAME).exists()


def test_a_folder_that_was_deleted_and_is_another_runs_now_keeps_its_lock(tmp_path: Path) -> None:
    mine = lock.take(tmp_path / "out", me())
    shutil.rmtree(tmp_path / "out")
    theirs = lock.take(tmp_path / "out", me(run="theirs", pid=os.getpid() + 1))
    mine.release()
    assert lock.read(tmp_path / "out") == theirs.owner
    theirs.release()
    assert not (tmp_path / "out").exists()


def test_without_flock_an_owner_removes_its_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    mine = lock.take(tmp_path / "out", me())
    mine.release()
    assert not (tmp_path / "out").exists()
    mine = lock.take(tmp_path / "out", me())
    shutil.rmtree(tmp_path / "out")
    theirs = lock.take(tmp_path / "out", me(run="theirs"))
    mine.release()
    assert lock.read(tmp_path / "out") == theirs.owner


def test_looking_refuses_what_taking_would_and_leaves_no_trace(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (tmp_path / lock.NAME).read_bytes()
    with pytest.raises(AscendError, match=f"is in use by another run: host .*, pid {other.pid}"):
        lock.look(tmp_path, me())
    assert (tmp_path / lock.NAME).read_bytes() == before
    other.kill()
    other.wait()
    lock.look(tmp_path, me())  # left behind: taking takes it over
    lock.look(tmp_path / "a/b", me())
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file/out", "dangling", "dangling/out"):
        with pytest.raises(AscendError, match=r"cannot be written: .*(file|dangling) is no folder"):
            lock.look(tmp_path / name, me())
        with pytest.raises(AscendError, match="cannot be written"):
            lock.take(tmp_path / name, me())
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(AscendError, match="may not be written"):
        lock.look(tmp_path / "a/b", me())
    assert sorted(path.name for path in tmp_path.iterdir()) == [lock.NAME, "dangling", "file"]
