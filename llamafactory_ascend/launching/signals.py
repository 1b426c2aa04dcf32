"""What a signal asks of a process: to stop, at the next step where something can be saved, else at once.

Schedulers, `docker stop` and Kubernetes send SIGTERM and kill some seconds later; torchrun passes it on to
its ranks and kills them after 30 s. SIGINT is Ctrl-C: the second one stops at once. SIGHUP
comes when a terminal is closed.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ASKED = "asked_for"  # marks an exception that a signal has asked for


class Stopped(SystemExit):
    """SIGTERM or SIGHUP has ended the run. The exit code is 128 + the signal, as a shell expects."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.code = 128 + signum


def stop(signum: int, message: str) -> BaseException:
    """Return what to raise to end the process for a signal, at a place of its own.

    For Ctrl-C that is KeyboardInterrupt itself: for a class of it Python would exit with 1, not as 130.
    """
    error = KeyboardInterrupt(message) if signum == signal.SIGINT else Stopped(signum, message)
    vars(error)[ASKED] = True
    return error


def is_stop(error: BaseException) -> bool:
    """True for what ``stop`` has returned."""
    return ASKED in vars(error)


def say(message: str) -> None:
    """Print from a signal handler, in which the stream may be in the middle of another line."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n[llamafactory-ascend] {message}\n".encode())


class Requests:
    """Hears the signals that end a process, in one that trains.

    Attributes:
        holding: a signal is kept until somebody asks for it, because a training goes on that can be saved.
        signum: the first signal that has been kept, 0 where there was none.
    """

    def __init__(self) -> None:
        self.holding = False
        self.signum = 0
        self.process = os.getpid()
        self.previous: dict[int, Any] = {}
        self.forks = False  # are looked at

    def listen(self) -> None:
        """Stop at once from now on."""
        self.holding = False
        self._hear()

    def hold(self) -> None:
        """Keep signals from now on."""
        self.holding = True
        if not self.forks:
            self.forks = True
            os.register_at_fork(after_in_child=self._leave_group)
        self._hear()

    def _hear(self) -> None:
        """Handle what ends a process; what somebody has chosen to ignore (nohup, a shell's `&`) stays so."""
        for signum in STOPPING:
            self._handle(signum)

    def end(self) -> None:
        """Forget everything; signals mean again what they meant before."""
        self.holding, self.signum = False, 0
        for signum in tuple(self.previous):
            self._restore(signum)

    def _handle(self, signum: int) -> None:
        if threading.current_thread() is not threading.main_thread() or signum in self.previous:
            return  # only the main thread hears signals
        found = signal.getsignal(signum)
        if found is not signal.SIG_IGN:
            self.previous[signum] = found
            signal.signal(signum, self._heard)

    def _restore(self, signum: int) -> None:
        if signum in self.previous and threading.current_thread() is threading.main_thread():
            signal.signal(signum, self.previous.pop(signum) or signal.SIG_DFL)

    def _heard(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # a forked child that has not set its own
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif self.signum:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt("a second SIGINT: stopped at once")
        elif self.holding:
            self.signum = signum
        else:
            self.signum = signum  # torchrun sends its own when the first rank has gone
            raise stop(signum, f"{signal.Signals(signum).name}: stopped, there was nothing to save")

    def _leave_group(self) -> None:
        """Keep data loader workers out of reach of a signal to the whole group: a last step needs them.

        They go with their parent in any case: they watch it.
        """
        if self.holding:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)


requests = Requests()


@contextlib.contextmanager
def handled(handle: Callable[[int], None], *signums: int) -> Iterator[None]:
    """Call ``handle(signum)`` for signals within the block, but for those that are ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {signum: signal.getsignal(signum) for signum in signums}
    heard = {signum: found for signum, found in previous.items() if found is not signal.SIG_IGN}
    for signum in heard:
        signal.signal(signum, lambda number, _: handle(number))
    try:
        yield
    finally:
        for signum, found in heard.items():
            signal.signal(signum, found or signal.SIG_DFL)
