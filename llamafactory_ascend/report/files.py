"""The report on disk: valid JSON at every moment, whoever writes it and whoever is killed."""

import contextlib
import datetime
import errno
import fcntl
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

NAME = "ascend_report.json"
LOCK = ".ascend_report.lock"
PATIENCE = 10.0  # seconds that a writer waits for another one, whose turn takes milliseconds
STALE = 3.0  # seconds after which a lock file that does not change has lost its owner

# The step stands first, in a field of fixed width: it can be moved on in place, by one small write of digits
# and blanks, while writing the whole file costs milliseconds.
HEAD = b'{\n  "last_step": '
WIDTH = 12

Report = dict[str, Any]


def plain(value: Any) -> Any:
    """Return ``value`` as JSON knows it; NaN, infinities and what else JSON lacks become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    return str(value)


def render(report: Report) -> bytes:
    """Return the bytes of the file: JSON in UTF-8, the step first (see HEAD)."""
    rest = json.dumps(
        plain({key: value for key, value in report.items() if key != "last_step"}),
        ensure_ascii=False,
        allow_nan=False,
        indent=2,
    )
    # A path that is no UTF-8 holds lone surrogates; written as \udcxx they are JSON again.
    body = rest.removeprefix("{").encode("utf-8", errors="backslashreplace")
    return HEAD + b"%*d," % (WIDTH, report["last_step"]) + body + b"\n"


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file in one step, so that a reader or a kill never meets half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o666 & ~_umask())  # mkstemp makes files only their owner can read
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read(path: Path) -> Report:
    """Return the report at ``path``, {} where there is none or it is not one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def update(folder: Path, change: Callable[[Report], Report | None]) -> int:
    """Read, change and write the report in ``folder`` while no other process does.

    Args:
        change: gets the report, {} if there is none; returns the new one, None to leave it as it is.

    Returns:
        The inode of the file, for ``beat``.

    Raises:
        OSError: it cannot be read or written, or another process has held the lock for ``PATIENCE`` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    with locked(folder):
        found = change(_read_for_change(path))
        if found is not None:
            write_atomic(path, render(found))
        return path.stat().st_ino if path.exists() else 0


def beat(folder: Path, step: int, inode: int) -> bool:
    """Move ``last_step`` on in place.

    Returns:
        False where nothing was written because the file is not the one with that inode (somebody has
        replaced it) or does not start with a step: the caller must ``update``.
    """
    with locked(folder):
        try:
            handle = os.open(folder / NAME, os.O_RDWR)
        except (FileNotFoundError, PermissionError):
            return False
        try:
            if os.fstat(handle).st_ino != inode or os.pread(handle, len(HEAD), 0) != HEAD:
                return False
            os.pwrite(handle, b"%*d" % (WIDTH, step), len(HEAD))
            return True
        finally:
            os.close(handle)


def _read_for_change(path: Path) -> Report:
    """Return the report; unlike ``read`` never {} for one that is only unreadable at the moment."""
    for attempt in range(3):
        try:
            found = json.loads(path.read_bytes())
            break
        except FileNotFoundError:
            return {}
        except OSError as error:
            if error.errno != errno.ESTALE or attempt == 2:  # NFS: another node has replaced the file
                raise
        except (ValueError, RecursionError):
            found = None
            break
    if isinstance(found, dict):
        return found
    set_aside(path.parent)
    return {}


def set_aside(folder: Path) -> None:
    """Keep the report of another run under the time it started; the caller holds the lock."""
    path = folder / NAME
    if not path.exists():
        return
    modified = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
    started = str(read(path).get("started") or modified.isoformat(timespec="seconds"))
    started = started.replace(":", "").replace("/", "")
    goal, count = folder / f"ascend_report.{started}.json", 1
    while goal.exists():
        count += 1
        goal = folder / f"ascend_report.{started}-{count}.json"
    path.rename(goal)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the report of ``folder``: through the folder itself, so that no lock file is left behind.

    Where folders cannot be locked (NFS, some overlays) through a lock file, which works on every filesystem.

    Raises:
        TimeoutError: another process has held it for ``PATIENCE`` seconds.
    """
    deadline = time.monotonic() + PATIENCE
    handle = os.open(folder, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _wait(folder, deadline)
            except OSError:
                with _lock_file(folder, deadline):
                    yield
                return
            else:
                yield
                return
    finally:
        os.close(handle)


@contextlib.contextmanager
def _lock_file(folder: Path, deadline: float) -> Iterator[None]:
    path = folder / LOCK
    seen: tuple[int, int] | None = None
    since = time.monotonic()
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                # Watched by our own clock: the clocks of two nodes differ.
                if (found.st_ino, found.st_mtime_ns) != seen:
                    seen, since = (found.st_ino, found.st_mtime_ns), time.monotonic()
                elif time.monotonic() - since > STALE:
                    path.unlink()
                    continue
            _wait(folder, deadline)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _wait(folder: Path, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{folder / NAME} has been locked by another process for {PATIENCE:.0f} s")
    time.sleep(0.002)
