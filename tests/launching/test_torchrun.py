"""torchrun is stopped through its ranks, and nothing of it stays behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamafactory_ascend.launching import processes, torchrun

# What torchrun does, in short: ranks in sessions of their own, killed on its SIGTERM, restarted if it may.
AGENT = """
import signal, subprocess, sys, time
folder, rank, restarts = sys.argv[1], sys.argv[2], int(sys.argv[3])
class Signal(Exception): pass
def handler(number, _):
    raise Signal(number)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, handler)
ranks = []
def start():
    command = [sys.executable, "-c", rank, folder]
    ranks[:] = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
try:
    start()
    while True:
        time.sleep(0.05)
        if all(process.poll() is not None for process in ranks):
            if not restarts:
                sys.exit(1)
            restarts -= 1
            start()
except Signal as error:
    open(folder + "/agent", "a").write(f"{error} ")
    for process in ranks:
        process.kill()
        process.wait()
    sys.exit(9)
"""
SAVES = """
import pathlib, signal, sys, os, time
def save(number, _):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1], f"saved-{number}-{os.getpid()}").touch()
    os._exit(143)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
pathlib.Path(sys.argv[1], f"ready-{os.getpid()}").touch()
time.sleep(60)
"""
HANGS = SAVES.replace("def save(number, _):\n", "def save(number, _):\n    return\n")


class Signals(threading.Thread):
    """Sends signals to this process, the first once two ranks are ready, each after a pause."""

    def __init__(self, folder: Path, *numbers: int) -> None:
        super().__init__()
        self.folder, self.numbers = folder, numbers

    def run(self) -> None:
        while len(list(self.folder.glob("ready-*"))) < 2:
            time.sleep(0.02)
        for number in self.numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.5)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(processes.children(os.getpid()))  # of other tests, such as multiprocessing's tracker
    yield
    assert set(processes.children(os.getpid())) <= before


def stopped(folder: Path, rank: str, *numbers: int, restarts: int = 0) -> torchrun.Signalled:
    sender = Signals(folder, *numbers)
    sender.start()
    with pytest.raises(torchrun.Signalled) as error:
        torchrun.run([sys.executable, "-c", AGENT, str(folder), rank, str(restarts)], None)
    sender.join()
    assert all(processes.born(int(path.name.rpartition("-")[2])) is None for path in folder.glob("ready-*"))
    return error.value


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_the_ranks_are_told_and_waited_for(tmp_path: Path, number: int, code: int) -> None:
    error = stopped(tmp_path, SAVES, number)
    assert (error.code, error.torchrun) == (code, 1)
    asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    assert len(list(tmp_path.glob(f"saved-{asked}-*"))) == 2
    assert not (tmp_path / "agent").exists()  # it would give them 30 s


def test_a_second_sigterm_changes_nothing(tmp_path: Path) -> None:
    assert stopped(tmp_path, SAVES, signal.SIGTERM, signal.SIGTERM).code == 143
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_ranks_that_have_stopped_are_not_started_again(tmp_path: Path) -> None:
    error = stopped(tmp_path, SAVES, signal.SIGTERM, restarts=5)
    assert (error.code, error.torchrun) == (143, 9)
    assert (tmp_path / "agent").read_text() == "15 " and len(list(tmp_path.glob("saved-*"))) == 2


def test_a_second_ctrl_c_is_for_torchrun(tmp_path: Path) -> None:
    error = stopped(tmp_path, HANGS, signal.SIGINT, signal.SIGINT)
    assert (error.code, error.torchrun) == (130, 9) and (tmp_path / "agent").read_text() == "2 "


@pytest.mark.parametrize(("rank", "saved"), [(SAVES, 2), (HANGS, 0)])
def test_ranks_of_a_torchrun_that_was_killed_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], rank: str, saved: int
) -> None:
    """Stock leaves them training, in an output_dir that the next launch finds free."""
    monkeypatch.setattr(torchrun, "LAST", 2.0)
    kills = "import os, threading\nthreading.Timer(3, os.kill, (os.getpid(), 9)).start()\n"
    command = [sys.executable, "-c", kills + AGENT, str(tmp_path), rank, "0"]
    assert torchrun.run(command, None) == -signal.SIGKILL
    assert len(list(tmp_path.glob("saved-15-*"))) == saved
    ranks = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("ready-*")]
    assert len(ranks) == 2 and all(processes.born(pid) is None for pid in ranks)
    assert capfd.readouterr().err.count("torchrun was killed by SIGKILL: its ranks save") == 1


def test_an_end_of_its_own_is_passed_on(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    code = "import os, sys; sys.exit(os.getsid(0) != os.getpid())"  # in a session of its own
    assert torchrun.run([sys.executable, "-c", code], None) == 0
    assert torchrun.run([sys.executable, "-c", "raise SystemExit(3)"], None) == 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_processes_are_known_by_their_birth() -> None:
    before = processes.children(os.getpid())
    child = subprocess.Popen(["sleep", "9"])
    assert {*processes.children(os.getpid())} == {*before, child.pid}
    assert (processes.born(child.pid) or 0) >= (processes.born(os.getpid()) or 1 << 62)
    child.kill()
    time.sleep(0.1)
    assert processes.born(child.pid) is None  # a zombie
    child.wait()
    processes.send(child.pid, signal.SIGTERM)
