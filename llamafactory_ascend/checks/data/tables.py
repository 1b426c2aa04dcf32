"""Rows of a data set's files, whatever their type; all but JSON as the library `datasets` reads them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamafactory_ascend.checks.data import encodings, json_rows
from llamafactory_ascend.checks.data.json_rows import Row, Watch
from llamafactory_ascend.checks.data.problem import Problem
from llamafactory_ascend.checks.data.schema import FILE_TYPES


def files_of(path: Path) -> list[Path]:
    """Return the files of a data set: itself, or everything in its folder; none where it is not there.

    The host takes the order of the file system; where the rows are numbered, names are in order here.
    """
    if not os.path.exists(path):  # noqa: PTH110 - False for any name that cannot be, where Path raises
        return []
    if not path.is_dir():
        return [path]
    with contextlib.suppress(PermissionError):
        return sorted(path.iterdir())
    return []


def size(files: list[Path]) -> int:
    """Return the bytes of files; what cannot be looked at counts none, and reading says why."""
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def type_problems(files: list[Path]) -> list[Problem]:
    """Return what the host refuses: no file, a type it does not know, several types."""
    others = "move everything else out of the folder" if len(files) > 1 else ""
    for file in files:
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "is no file" if file.exists() else "is a broken link"
            return [Problem("error", "no_file", f"{file} {what}", others)]
    unknown = [file for file in files if file.suffix[1:] not in FILE_TYPES]
    if unknown:
        known = ", ".join(f".{ending}" for ending in FILE_TYPES)
        message = f"{unknown[0]}: files must end with one of {known}"
        return [Problem("error", "file_type", message, others)]
    kinds = {FILE_TYPES[file.suffix[1:]] for file in files}
    if len(kinds) > 1:
        message = f"files of several types in one folder ({', '.join(sorted(kinds))}): {files[0].parent}"
        return [Problem("error", "file_type", message, "make a folder for each type")]
    return []


def read(files: list[Path], watch: Watch | None = None) -> Iterator[Row | Problem]:
    """Yield the rows of all files, numbered from 0, or what is wrong with a file."""
    number = 0
    for file in files:
        kind = FILE_TYPES[file.suffix[1:]]
        one = (
            json_rows.read(file, number, watch) if kind == "json" else _read_table(file, kind, number, watch)
        )
        try:
            for item in one:
                if isinstance(item, Row):
                    number = item.number + 1
                yield item
        except OSError as error:
            yield Problem("error", "file", f"{file} cannot be read: {error.strerror or error}")


def _read_table(file: Path, kind: str, first: int, watch: Watch | None) -> Iterator[Row | Problem]:
    if kind in ("csv", "text"):
        yield from _encoding_problems(file)
    try:
        for number, value in enumerate(_stream(file, kind), start=first):
            yield Row(number, value)
    except Exception as error:  # whatever pandas, Arrow or the library raise, in words of their own
        cause = " ".join(str(error.__cause__ or error).split())
        yield Problem("error", "file", f"{file} cannot be read as {kind}: {cause[:300]}")
    if watch:
        watch(size([file]))


def _encoding_problems(file: Path) -> Iterator[Problem]:
    found = encodings.of_file(file)
    if not found.readable and found.codec != "UTF-8":  # a mark before UTF-8 does no harm here
        yield encodings.problem(file, found)


def _stream(file: Path, kind: str) -> Iterator[dict[str, Any]]:
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from datasets import load_dataset  # type: ignore[import-untyped]

    rows: Any = load_dataset(kind, data_files=[str(file)], split="train", streaming=True)
    yield from rows


def count(path: Path, limit: int = 32 << 20) -> int | None:
    """Return the number of rows where it is cheap to know: small JSON, Parquet; None elsewhere."""
    files = files_of(path)
    if not files or type_problems(files) or size(files) > limit:
        return None
    if all(file.suffix == ".parquet" for file in files):
        import pyarrow.parquet  # type: ignore[import-untyped]

        with contextlib.suppress(OSError, pyarrow.ArrowException):
            return int(sum(pyarrow.parquet.ParquetFile(file).metadata.num_rows for file in files))
    if all(FILE_TYPES[file.suffix[1:]] == "json" for file in files):
        rows = 0
        for item in read(files):
            if isinstance(item, Problem):
                return None
            rows += 1
        return rows
    return None
