"""The file under bad conditions: other writers, full and foreign filesystems, odd values, kills."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamafactory_ascend.report import files

START: dict[str, Any] = {"last_step": 0, "run": "a", "failures": []}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def no_constant(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


@given(values, st.integers(0, 10**11))
@settings(max_examples=300, deadline=None)
def test_whatever_a_plugin_reports_becomes_json(value: Any, step: int) -> None:
    data = files.render({"last_step": step, "section": value})
    found = json.loads(data.decode("utf-8"), parse_constant=no_constant)
    assert found == {"last_step": step, "section": files.plain(value)}


def test_values_that_json_lacks() -> None:
    found = files.plain(
        {1: float("nan"), "b": [float("inf"), -float("inf")], "c": Path("x/y"), "d": {"z", "a"}}
    )
    assert found == {"1": "NaN", "b": ["Infinity", "-Infinity"], "c": "x/y", "d": ["a", "z"]}


def test_a_path_that_is_no_utf8_survives(tmp_path: Path) -> None:
    name = os.fsdecode(b"b\xff\xe4")
    folder = tmp_path / name / "中文 run"
    files.update(folder, lambda _: {**START, "folder": name})
    assert files.read(folder / files.NAME)["folder"] == name


def test_beat_moves_the_step_alone(tmp_path: Path) -> None:
    inode = files.update(tmp_path, lambda _: {**START, "ü": ["ö", 1]})
    before = (tmp_path / files.NAME).read_bytes()
    assert files.beat(tmp_path, 123456, inode)
    after = (tmp_path / files.NAME).read_bytes()
    assert json.loads(after) == {**json.loads(before), "last_step": 123456} and len(before) == len(after)


def test_beat_leaves_a_file_that_somebody_else_has_written(tmp_path: Path) -> None:
    inode = files.update(tmp_path, lambda _: START)
    files.update(tmp_path, lambda found: {**found, "failures": ["of rank 1"]})
    assert not files.beat(tmp_path, 7, inode)
    assert files.read(tmp_path / files.NAME) == {**START, "failures": ["of rank 1"]}
    (tmp_path / files.NAME).unlink()
    assert not files.beat(tmp_path, 7, inode)


def test_a_step_costs_microseconds(tmp_path: Path) -> None:
    """Measured on two shared cores with a report of 49 kB: 18 us for a beat, 3.3 ms for a whole write."""
    inode = files.update(tmp_path, lambda _: {**START, "patches": ["x" * 40_000]})
    times = []
    for step in range(200):
        start = time.perf_counter()
        assert files.beat(tmp_path, step, inode)
        times.append(time.perf_counter() - start)
    assert sorted(times)[100] < 0.001


WRITER = """
import sys
from pathlib import Path
from llamafactory_ascend.report import files
folder, name, no_flock = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
if no_flock:
    import errno, fcntl
    def flock(*_): raise OSError(errno.EBADF, "no locks on folders here")
    fcntl.flock = flock
for count in range(40):
    files.update(folder, lambda found: {**found, "failures": [*found["failures"], f"{name}.{count}"]})
    files.beat(folder, count, (folder / files.NAME).stat().st_ino)
"""


@pytest.mark.parametrize("no_flock", ["0", "1"], ids=["flock", "lock file"])
def test_no_writer_loses_anothers_word_and_no_reader_meets_half_a_file(tmp_path: Path, no_flock: str) -> None:
    files.update(tmp_path, lambda _: START)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(rank), no_flock]) for rank in range(3)]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        assert isinstance(json.loads((tmp_path / files.NAME).read_bytes())["last_step"], int)
        reads += 1
    assert [writer.returncode for writer in writers] == [0, 0, 0] and reads > 100
    failures = files.read(tmp_path / files.NAME)["failures"]
    assert sorted(failures) == sorted(f"{rank}.{count}" for rank in range(3) for count in range(40))
    assert [path.name for path in tmp_path.iterdir()] == [files.NAME]


def test_a_lock_file_without_an_owner_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(files, "STALE", 0.1)
    (tmp_path / files.LOCK).touch()
    files.update(tmp_path, lambda _: START)
    assert [path.name for path in tmp_path.iterdir()] == [files.NAME]


@pytest.mark.parametrize("no_flock", [False, True])
def test_a_lock_that_is_held_for_ever_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_flock: bool
) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.2)
    if no_flock:

        def flock(*_: Any) -> None:
            raise OSError(errno.EOPNOTSUPP, "no locks")

        monkeypatch.setattr(fcntl, "flock", flock)
        monkeypatch.setattr(files, "STALE", 60.0)
        (tmp_path / files.LOCK).touch()
    else:
        holder = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(TimeoutError, match="locked by another process"):
        files.update(tmp_path, lambda _: START)


def test_a_stale_file_handle_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.update(tmp_path, lambda _: {**START, "failures": ["of rank 1"]})
    read_bytes, errors = Path.read_bytes, [OSError(errno.ESTALE, "stale"), OSError(errno.ESTALE, "stale")]

    def stale(path: Path) -> bytes:
        if errors:
            raise errors.pop()
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", stale)
    files.update(tmp_path, lambda found: {**found, "last_step": 1})
    assert files.read(tmp_path / files.NAME)["failures"] == ["of rank 1"] and not errors


def test_a_report_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.update(tmp_path, lambda _: START)

    def broken(path: Path) -> bytes:
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        with pytest.raises(OSError, match="broken disk"):
            files.update(tmp_path, lambda found: {**START, "run": "b"})
    assert files.read(tmp_path / files.NAME)["run"] == "a"


def test_a_disk_that_is_full_leaves_the_old_file_whole(tmp_path: Path) -> None:
    files.update(tmp_path, lambda _: START)
    program = (
        "import resource, sys; from pathlib import Path; from llamafactory_ascend.report import files\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "files.update(Path(sys.argv[1]), lambda found: {**found, 'text': 'x' * 100_000})"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "File too large" in done.stderr
    assert files.read(tmp_path / files.NAME) == START
    assert [path.name for path in tmp_path.iterdir()] == [files.NAME]


def test_garbage_is_kept_beside_a_new_report(tmp_path: Path) -> None:
    (tmp_path / files.NAME).write_text('{"half": ')
    files.update(tmp_path, lambda found: START if found == {} else {})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2 and files.read(tmp_path / files.NAME) == START
    assert (tmp_path / names[0]).read_text() == '{"half": '


def test_reports_set_aside_never_replace_each_other(tmp_path: Path) -> None:
    for run in "abc":
        (tmp_path / files.NAME).write_text(json.dumps({"run": run, "started": "2026-01-02T03:04:05+00:00"}))
        files.set_aside(tmp_path)
    kept = {path.name: files.read(path)["run"] for path in tmp_path.iterdir()}
    stem = "ascend_report.2026-01-02T030405+0000"
    assert kept == {f"{stem}.json": "a", f"{stem}-2.json": "b", f"{stem}-3.json": "c"}


def test_the_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    files.update(tmp_path, lambda _: START)
    (tmp_path / "other").touch()
    assert (tmp_path / files.NAME).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_threads_do_not_wait_for_themselves(tmp_path: Path) -> None:
    files.update(tmp_path, lambda _: START)

    def work() -> None:
        for _ in range(20):
            files.update(tmp_path, lambda found: {**found, "last_step": found["last_step"] + 1})

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.read(tmp_path / files.NAME)["last_step"] == 60
