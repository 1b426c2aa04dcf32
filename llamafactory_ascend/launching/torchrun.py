"""torchrun as the host's launcher starts it: beside the running Python, with words that may hold blanks.

It is stopped through its ranks. torchrun itself gives them 30 s before it kills them, which is no time to
save a large model in, and dies without them when only its parent is told to stop. Where it is killed (by the
kernel, for memory), its ranks would train on, in an output_dir whose lock has gone with it.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamafactory_ascend.launching import processes, signals

# -P: a folder `torch` or a file `random.py` where the user stands must not be imported
MODULE = ("-P", "-m", "torch.distributed.run")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LEFT = 1.0  # seconds between two looks whether the ranks that were told to stop have done so
LAST = 600.0  # seconds for the last step and its checkpoint, before ranks without a torchrun are killed

Rank = tuple[int, int | None]  # its process, and when that was started


class Signalled(SystemExit):
    """The launcher was told to stop by a signal, and its ranks have ended.

    Attributes:
        torchrun: torchrun's exit code.
    """

    def __init__(self, signum: int, torchrun: int) -> None:
        super().__init__(128 + signum)
        self.torchrun = torchrun


def words(command: Sequence[str], script: str, arguments: Sequence[str]) -> list[str] | None:
    """Return the command that the host meant, None where it is not what the host was known to run.

    Args:
        command: what it would run: ``torchrun``, options, script and arguments, split on blanks.
        script, arguments: the same two as they are.
    """
    split = f"{script} {' '.join(arguments)}".split()
    head = list(command[: len(command) - len(split)])
    if not head or head[0] != "torchrun" or list(command[len(head) :]) != split:
        return None
    return [sys.executable, *MODULE, *head[1:], script, *arguments]


def run(command: Sequence[str], env: Mapping[str, str] | None, held: Sequence[int] = ()) -> int:
    """Run torchrun to its end and return its exit code; a signal to this process stops its ranks first.

    It gets a session of its own, so that Ctrl-C and the end of a terminal reach this process alone.

    Args:
        held: file descriptors that torchrun holds open too: the lock of output_dir outlives this process.

    Raises:
        Signalled: a signal has ended it.
    """
    received: list[int] = []
    told: list[Rank] = []
    ranks: list[Rank] = []
    process: Any = None

    def heard(signum: int) -> None:
        received.append(signum)
        if process is None:
            return  # looked at as soon as there is something to stop
        name = signal.Signals(signum).name
        if len(received) == 1:
            told.extend(ranks_of(process.pid))
            signals.say(f"{name}: the ranks save at the end of this step, then they stop")
            pass_on(signum)
        elif signum == signal.SIGINT and received.count(signum) == 2:
            signals.say(f"a second {name}: stopping at once")
            process.send_signal(signal.SIGINT)
        elif signum == signal.SIGINT:
            for pid in [*processes.children(process.pid), process.pid]:
                processes.send(pid, signal.SIGKILL)

    def pass_on(signum: int) -> None:
        asked = signal.SIGTERM if signum == signal.SIGHUP else signum
        for rank, _ in told:
            processes.send(rank, asked)
        if not told:
            process.send_signal(signal.SIGTERM)

    def restarted() -> bool:
        return any(rank not in told for rank in ranks_of(process.pid))

    with signals.handled(heard, *SIGNALS):
        process = subprocess.Popen(list(command), env=env, start_new_session=True, pass_fds=tuple(held))
        if received:
            pass_on(received[0])
        while True:
            try:
                code = process.wait(LEFT)
                break
            except subprocess.TimeoutExpired:
                if not ranks or alive(ranks) != ranks:
                    ranks = ranks_of(process.pid)
                if received and restarted():
                    process.send_signal(signal.SIGTERM)  # MAX_RESTARTS has brought up others
        if code < 0:
            end_without_torchrun(ranks, -code, lambda: bool(received))
    if received:
        raise Signalled(received[0], code)
    return int(code)


def ranks_of(pid: int) -> list[Rank]:
    """Return the ranks of a torchrun that lives."""
    return [(rank, processes.born(rank)) for rank in processes.children(pid)]


def alive(ranks: Sequence[Rank]) -> list[Rank]:
    """Return those that have not ended; a later process can have the same number."""
    return [(pid, born) for pid, born in ranks if born is not None and processes.born(pid) == born]


def end_without_torchrun(ranks: Sequence[Rank], signum: int, hurry: Callable[[], bool]) -> None:
    """Stop the ranks of a torchrun that was killed: they save the step they are in, or are killed too.

    Args:
        signum: what has killed torchrun.
        hurry: True once nobody wants to wait for them.
    """
    if not alive(ranks):
        return
    signals.say(
        f"torchrun was killed by {signal.Signals(signum).name}: its ranks save at the end of this step, then "
        "they stop"
    )
    for asked, patience in ((signal.SIGTERM, LAST), (signal.SIGKILL, LEFT)):
        for pid, _ in alive(ranks):
            processes.send(pid, asked)
        deadline = time.monotonic() + patience
        while alive(ranks) and time.monotonic() < deadline and not (asked == signal.SIGTERM and hurry()):
            time.sleep(LEFT / 10)
