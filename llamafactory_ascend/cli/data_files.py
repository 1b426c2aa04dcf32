"""Files that data commands write: whole or not at all, and their entry in dataset_info.json."""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from llamafactory_ascend.errors import AscendError


def check_target(file: Path, force: bool) -> None:
    """Refuse a file that is there, or whose folder is not or is closed, before any work is done.

    Raises:
        AscendError: as said.
    """
    if not file.parent.is_dir():
        raise AscendError(f"there is no folder {file.parent.resolve()}", f"mkdir -p {file.parent}")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise AscendError(f"nothing can be written into the folder {file.parent.resolve()}")
    if file.is_dir():
        raise AscendError(f"{file} is a folder", "name a file in it")
    if file.exists() and not file.is_file():  # /dev/stdout: a new file would take its place
        raise AscendError(f"{file} is no ordinary file")
    if file.exists() and not force:
        raise AscendError(f"{file} exists; nothing was written", "--force overwrites it")


@contextmanager
def alone(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold a file or a folder against other processes of these commands, where it can be locked.

    Raises:
        AscendError: another one has it, and ``wait`` is not given.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise AscendError(f"{path} is in use: another process writes it") from None
        except OSError:
            pass  # no locks on this file system
        yield
    finally:
        os.close(handle)


@contextmanager
def written(file: Path) -> "Iterator[TextIO]":
    """Open a text that takes the file's place when it is whole; after an exception nothing has changed."""
    file = file.resolve()  # a link stays one
    handle, scratch = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        Path(scratch).chmod(0o666 & ~_mask())
        Path(scratch).replace(file)
    finally:
        Path(scratch).unlink(missing_ok=True)


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def entry_for(file: Path, dataset_dir: Path | None, columns: dict[str, str]) -> dict[str, Any]:
    """Return the keys of a file in dataset_info.json; its path is relative where it lies in `dataset_dir`."""
    inside = dataset_dir is not None and file.resolve().is_relative_to(dataset_dir.resolve())
    path = file.resolve().relative_to(dataset_dir.resolve()) if inside and dataset_dir else file.resolve()
    return {
        "file_name": str(path) if dataset_dir is not None else file.name,
        **({"columns": columns} if columns else {}),
    }


def register(name: str, keys: dict[str, Any], dataset_dir: Path | None) -> str:
    """Add an entry to dataset_info.json, or say what to write there; return the line that says so.

    Raises:
        AscendError: another data set has the name.
    """
    from llamafactory_ascend.checks.data import catalogue
    from llamafactory_ascend.cli import data_edit

    if dataset_dir is None:
        return f"for dataset_info.json: {json.dumps({name: keys}, ensure_ascii=False)[1:-1]}"
    source = catalogue.Source(dataset_dir / catalogue.INFO, "yours")
    changed = data_edit.edit(dataset_dir, [catalogue.Entry(name, keys, source, 1)], [])
    return f"{name}: {'added to' if changed else 'there already in'} {source.file}"


def check_name(name: str, keys: dict[str, Any], dataset_dir: Path | None) -> None:
    """Refuse a name that another entry has, before any work is done.

    Raises:
        AscendError: as said; or dataset_info.json cannot be read.
    """
    from llamafactory_ascend.checks.data import catalogue

    if dataset_dir is None:
        return
    own = catalogue.read([catalogue.Source(dataset_dir / catalogue.INFO, "yours")])
    for entry in own.entries.get(name, []):
        if entry.keys != keys:
            raise AscendError(
                f"{entry.place}: another data set is called `{name}`; nothing was written", "--name OTHER"
            )
