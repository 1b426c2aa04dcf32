"""One run per output_dir: a lock file that says who holds it, held by the kernel for as long as they live.

The kernel's lock (flock) goes with its last holder, whatever killed it, and is seen through containers that
share the folder. A file that nobody holds is therefore left over, and whoever comes next takes it; provided
that the kernel here is the one that would know: another machine's lock need not be visible. Where files
cannot be locked, the process's number has to do.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.launching import processes

NAME = ".ascend_run.lock"
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
PATIENCE = 1.0  # seconds for somebody to write who they are, after they made the file


@dataclass(frozen=True)
class Owner:
    """Who holds an output_dir.

    Attributes:
        run: the run's name, which the launcher gives to its ranks.
        host, pid: the process.
        started: when it took the lock, UTC, ISO 8601.
        machine: the kernel's boot id, other for every machine and after a restart of one.
        namespace: the processes among which the pid means something; other in another container.
        born: when the process was started, in ticks: a later one can have the same number.
        flock: the kernel has locked the file for it.
    """

    run: str
    host: str
    pid: int
    started: str
    machine: str
    namespace: str
    born: int
    flock: bool = True


def this_process(run: str, started: str) -> Owner:
    """Return this process as an owner."""
    return Owner(
        run,
        socket.gethostname(),
        os.getpid(),
        started,
        _read("/proc/sys/kernel/random/boot_id"),
        _link("/proc/self/ns/pid"),
        processes.born(os.getpid()) or 0,
    )


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="ascii").strip()
    return ""


def _link(path: str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(path).readlink())
    return ""


def is_alive(owner: Owner, here: Owner) -> bool | None:
    """Say whether an owner's process lives; None where that cannot be judged from this process."""
    if not owner.machine or owner.machine != here.machine or owner.namespace != here.namespace:
        return None
    return processes.born(owner.pid) == owner.born


class OutputLock:
    """The lock of one output_dir, held by this process.

    Attributes:
        taken_over: the owner who left it behind, None where the folder was free.
    """

    def __init__(self, folder: Path, handle: int, made: bool, taken_over: Owner | None, owner: Owner) -> None:
        self.folder, self.handle, self.made, self.taken_over = folder, handle, made, taken_over
        self.owner = owner  # as the file names it
        self.process = os.getpid()

    def release(self) -> None:
        """Give the folder free, in the process that took it; one that was made and is still empty goes."""
        if self.handle < 0 or os.getpid() != self.process:
            return
        with contextlib.suppress(OSError):
            if read(self.folder) == self.owner:  # the folder may have been deleted, and be another run's now
                (self.folder / NAME).unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(self.handle, fcntl.LOCK_UN)  # of forked children too
        os.close(self.handle)
        self.handle = -1
        if self.made:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def take(folder: Path, owner: Owner) -> OutputLock:
    """Lock ``folder``, which is made where it does not exist, for ``owner``: this process.

    Raises:
        AscendError: another run holds it, or may; or the folder cannot be written.
    """
    path = folder / NAME
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                lock = _hold(folder, handle, owner, made)
            except BaseException:
                os.close(handle)
                raise
            if lock is not None:
                return lock
            os.close(handle)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "?")
        raise AscendError(
            f"output_dir {folder} cannot be written: {code} (errno {error.errno}, {error.strerror}) "
            f"at {error.filename or path}",
            "choose another output_dir, or make this one writable; nothing has been loaded",
        ) from error


def _hold(folder: Path, handle: int, owner: Owner, made: bool) -> OutputLock | None:
    """Make the open lock file ours; None where it was removed meanwhile and must be opened again."""
    path = folder / NAME
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        found = _patiently(handle)
        if found is None and not _is_current(path, handle):
            return None
        raise AscendError(*_held(path, found, owner)) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return _hold_without_flock(folder, handle, owner, made)
    if not _is_current(path, handle):
        return None  # its owner has released it between our two calls
    found = _owner(handle)
    if found is not None and not _is_left_over(found, owner):
        raise AscendError(*_unknown(path, found, owner))
    _write(handle, owner)
    return OutputLock(folder, handle, made, found, owner)


def _hold_without_flock(folder: Path, handle: int, owner: Owner, made: bool) -> OutputLock | None:
    """The same where files cannot be locked: the first to link a file of its own into place has it."""
    path = folder / NAME
    found = _owner(handle)
    alive = None if found is None else is_alive(found, owner)
    if found is not None and alive is not False:
        raise AscendError(*(_held(path, found, owner) if alive else _unknown(path, found, owner)))
    owner = replace(owner, flock=False)
    mine, aside = (folder / f"{NAME}.{owner.host}.{owner.pid}.{kind}" for kind in ("new", "old"))
    try:
        path.rename(aside)  # the one that its owner left, or the empty one that opening it has made
        if not _is_current(aside, handle):  # no: somebody was faster, and this is theirs
            os.link(aside, path)
            return None
        with mine.open("wb") as file:
            _write(file.fileno(), owner)
        os.link(mine, path)
    except (FileNotFoundError, FileExistsError):
        return None
    finally:
        mine.unlink(missing_ok=True)
        aside.unlink(missing_ok=True)
    return OutputLock(folder, handle, made, found, owner)


def _is_current(path: Path, handle: int) -> bool:
    try:
        return os.fstat(handle).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _is_left_over(found: Owner, here: Owner) -> bool:
    """True where nobody can hold the lock any more, which the kernel's own lock has just been free for."""
    same_kernel = bool(found.machine) and found.machine == here.machine
    return (found.flock and same_kernel) or is_alive(found, here) is False


def look(folder: Path, here: Owner) -> None:
    """Say what ``take`` would refuse, as far as reading shows it: nothing is written, locked or made.

    Raises:
        AscendError: a run that lives holds the folder, or it cannot be written.
    """
    found = read(folder)
    if found is not None and is_alive(found, here):
        raise AscendError(*_held(folder / NAME, found, here))
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "may not be written" if nearest.is_dir() else "is no folder"
        raise AscendError(
            f"output_dir {folder} cannot be written: {nearest} {why}", "choose another output_dir"
        )


def read(folder: Path) -> Owner | None:
    """Return who holds a folder by what the file there says, None where there is none or it is unreadable."""
    with contextlib.suppress(OSError):
        handle = os.open(folder / NAME, os.O_RDONLY)
        try:
            return _owner(handle)
        finally:
            os.close(handle)
    return None


def _owner(handle: int) -> Owner | None:
    """Return who has written the file; None where it is empty or cut off, by a kill while it was written."""
    try:
        found: Any = json.loads(os.pread(handle, 1 << 16, 0))
        return Owner(**found)
    except (ValueError, TypeError, RecursionError):
        return None


def _patiently(handle: int) -> Owner | None:
    deadline = time.monotonic() + PATIENCE
    while (found := _owner(handle)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _write(handle: int, owner: Owner) -> None:
    data = json.dumps(asdict(owner), indent=1).encode() + b"\n"
    os.ftruncate(handle, 0)
    os.pwrite(handle, data, 0)
    os.fsync(handle)


def _held(path: Path, found: Owner | None, here: Owner) -> tuple[str, str]:
    text = who(found)
    if found is not None and is_alive(found, here) is False:
        text += "; that process is gone, but one that it started is still at work"
    wait = "wait for it, stop it"
    if found is not None:
        wait += f" (on {found.host}: kill {found.pid})"
    return (
        f"output_dir {path.parent} is in use by another run: {text}",
        f"{wait}, or choose another output_dir",
    )


def _unknown(path: Path, found: Owner, here: Owner) -> tuple[str, str]:
    where = (
        f"another container or user namespace of {found.host}"
        if found.machine == here.machine
        else f"another machine than this one ({here.host}), or this one before it was restarted"
    )
    return (
        f"output_dir {path.parent} may be in use by another run: {who(found)}. It ran on {where}, "
        "so whether it still does cannot be judged from here",
        f"make sure that it does not, then: rm {path}",
    )


def who(found: Owner | None) -> str:
    """Return an owner as text."""
    if found is None:
        return "a process that has not said who it is"
    return f"host {found.host}, pid {found.pid}, started {found.started}"
