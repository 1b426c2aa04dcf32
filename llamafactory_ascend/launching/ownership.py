"""Who takes the lock of output_dir: the launcher where there is one, else rank 0 with its arguments parsed.

One run has one taker, so the nodes of a run that share the folder never refuse each other.
"""

import atexit
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from llamafactory_ascend import log
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.launching import lock, signals
from llamafactory_ascend.report import document, gathering

LOCKED = "LLAMAFACTORY_ASCEND_LOCKED"  # the folder that the launcher of this run holds for its ranks

_locks: list[lock.OutputLock] = []  # what this process holds; a list, because runs in a process can be nested


def is_takers_turn(environ: Mapping[str, str]) -> bool:
    """True for the launcher of rank 0's node; where only the rendezvous knows that, rank 0 takes the lock."""
    nodes = max(environ.get("NNODES", "1"), environ.get("MAX_NNODES", "1"), key=_number)
    return _number(nodes) <= 1 or ("RDZV_ID" not in environ and environ.get("NODE_RANK", "0") == "0")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 1


def take(folder: Path) -> None:
    """Take the lock of a folder for this process, which holds it until ``ending`` or its own end.

    Raises:
        AscendError: another run holds it, or the folder cannot be written.
    """
    if any(held.folder == folder.absolute() and held.handle >= 0 for held in _locks):
        return
    owner = lock.this_process(os.environ.get(document.RUN_ID, ""), document.now())
    taken = lock.take(folder.absolute(), owner)
    if not _locks:
        atexit.register(_release)
    _locks.append(taken)
    os.environ[LOCKED] = str(taken.folder)
    if taken.taken_over is not None:
        left = taken.taken_over
        log.info(
            f"output_dir {folder}: a run on {left.host}, pid {left.pid}, started {left.started}, was killed "
            "and left its lock behind; taken over"
        )


def take_in_rank(folder: Path) -> None:
    """Make sure that this run holds its output_dir; every rank must call this at the same point.

    Raises:
        AscendError: another run holds it, or the folder cannot be written; on every rank.
    """
    refusal = None
    if log.rank() == 0 and os.environ.get(LOCKED) != str(folder.absolute()):
        try:
            take(folder)
        except AscendError as error:
            refusal = (error.what, error.hint)
    refusal = gathering.all_gather(refusal)[0]
    if refusal is not None:
        raise AscendError(*refusal)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Give back at the end of the block what was taken in it: locks, and the meaning of signals.

    A rank that was told to stop stays deaf: torchrun sends SIGTERM to all as soon as the first has ended.
    """
    before, named = len(_locks), os.environ.get(LOCKED)
    try:
        yield
    finally:
        while len(_locks) > before:
            _locks.pop().release()
        if named is None:
            os.environ.pop(LOCKED, None)
        else:
            os.environ[LOCKED] = named
        if not (signals.requests.signum and "LOCAL_RANK" in os.environ):
            signals.requests.end()


def handles() -> list[int]:
    """Return the file descriptors through which this process holds its locks."""
    return [held.handle for held in _locks if held.handle >= 0]


def _release() -> None:
    for held in _locks:
        held.release()
