"""``llamafactory-ascend data add`` and ``data remove``: entries of the user's own dataset_info.json."""

import filecmp
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamafactory_ascend.cli import failures
from llamafactory_ascend.errors import AscendError

if TYPE_CHECKING:
    from llamafactory_ascend.checks.data.catalogue import Entry

ADD_EPILOG = """
Examples:

  llamafactory-ascend data add vertical_demo --dataset-dir data

  llamafactory-ascend data add extra/dataset_info.json --dataset-dir data

Exit codes: 0 added, or there already; 2 nothing was written: no such fragment, or its name is taken.
"""
REMOVE_EPILOG = """
Examples:

  llamafactory-ascend data remove vertical_demo --dataset-dir data

Exit codes: 0 removed, 2 nothing was written: no such entry.
"""
Folder = Annotated[Path, typer.Option(help="Holds dataset_info.json.")]


def add(
    fragment: Annotated[
        str,
        typer.Argument(metavar="FRAGMENT", help="A name of `data ls`, or a dataset_info.json: all of it."),
    ],
    dataset_dir: Folder = Path("data"),
) -> None:
    """Copy data sets into dataset_dir: their files, and their entries into its dataset_info.json.

    What is there keeps its order and its indentation; the file as it was is kept as dataset_info.json.bak.
    """
    with failures.told(dataset_dir):
        entries = chosen(fragment, dataset_dir)
        copies = plan_copies(entries, dataset_dir)
        changed = edit(dataset_dir, entries, copies)
    for entry in entries:
        typer.echo(f"{entry.name}: {'added' if entry.name in changed else 'there already'}")
    for _, target in copies:
        typer.echo(f"copied {target}")
    for entry in entries:
        if media := media_of(entry):
            typer.echo(media)


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An entry of dataset_info.json.")],
    dataset_dir: Folder = Path("data"),
) -> None:
    """Take an entry out of dataset_info.json; its data files stay. What was there is kept as .bak."""
    from llamafactory_ascend.checks.data import catalogue, info_text, tables

    source = catalogue.Source(dataset_dir / catalogue.INFO, "yours")
    with failures.told(dataset_dir), _held(dataset_dir):
        found = catalogue.read([source])
        entry = found.find(name)
        text = _text(source.file)
        _replace(source.file, info_text.remove(text, name))
    typer.echo(f"{name}: removed from {source.file}")
    if entry.path is not None and tables.files_of(entry.path):
        typer.echo(f"{entry.path} stays")


def chosen(fragment: str, dataset_dir: Path) -> "list[Entry]":
    """Return the entries that a name or a file stands for.

    Raises:
        AscendError: there is no such thing, or its file cannot be read.
    """
    from llamafactory_ascend.checks.data import catalogue
    from llamafactory_ascend.features import data_checks

    if fragment.endswith(".json") or Path(fragment).is_dir():
        file = Path(fragment)
        return catalogue.read_source(
            catalogue.Source(file / catalogue.INFO if file.is_dir() else file, "settings")
        )
    known = data_checks.catalogue(dataset_dir)
    found = catalogue.Catalogue(
        {
            name: others
            for name, entries in known.entries.items()
            if (others := [entry for entry in entries if entry.source.origin != "yours"])
        },
        known.sources,
    )
    return [found.find(fragment)]


def plan_copies(entries: "list[Entry]", dataset_dir: Path) -> list[tuple[Path, Path]]:
    """Return (source, target) of every file that has to be copied; what is there with the same bytes is not.

    Raises:
        AscendError: a file is missing, lies outside its fragment's folder, or another one is in its place.
    """
    from llamafactory_ascend.checks.data import catalogue, tables

    copies: dict[Path, Path] = {}
    for entry in entries:
        path = entry.path
        if path is None:
            continue
        if catalogue.climbs_out(entry):
            raise AscendError(f"{entry.place}: `{entry.name}` names a file outside its own folder: {path}")
        if not tables.files_of(path):
            if (dataset_dir / path.relative_to(entry.folder)).exists():
                continue  # the user's own copy of what is not shipped
            raise AscendError(
                f"{entry.place}: the file of `{entry.name}` does not exist: {path}", _described(entry)
            )
        for file in tables.files_of(path):
            target = dataset_dir / file.relative_to(entry.folder)
            if not target.exists():
                copies[target] = file
            elif not filecmp.cmp(file, target, shallow=False):
                raise AscendError(
                    f"{target} is another file than {file}; nothing was written", "move it, or rename it"
                )
    return [(source, target) for target, source in copies.items()]


def media_of(entry: "Entry") -> str:
    """Say where the media of an entry are, which are not copied; "" where it has none."""
    from llamafactory_ascend.checks.data import schema

    columns = schema.layout(entry.keys).columns
    names = [name for name in schema.MEDIA if columns[name]]
    if not names:
        return ""
    where = f"they lie in {entry.folder.resolve()}"
    said = _described(entry) if entry.source.origin == "shipped" else where
    return f"{entry.name}: {' and '.join(names)} are not copied, {said}; `media_dir: DIR` names their folder"


def _described(entry: "Entry") -> str:
    said = entry.keys.get("description", "")
    return f"its entry says: {said}" if said else ""


def edit(dataset_dir: Path, entries: "list[Entry]", copies: list[tuple[Path, Path]]) -> list[str]:
    """Copy the files, then write the entries; a copy that fails leaves dataset_info.json as it was.

    Returns:
        The names of entries that were not there.

    Raises:
        AscendError: another entry has one of the names.
    """
    from llamafactory_ascend.checks.data import catalogue, info_text

    dataset_dir.mkdir(parents=True, exist_ok=True)
    with _held(dataset_dir):
        file = dataset_dir / catalogue.INFO
        own = catalogue.read([catalogue.Source(file, "yours")])
        there = {name: found[0] for name, found in own.entries.items()}
        text, changed = _text(file) if file.exists() else "", []
        for entry in entries:
            if not isinstance(entry.keys, Mapping):
                raise AscendError(f"{entry.place}: `{entry.name}` is no block of keys")
            if entry.name not in there:
                text = info_text.add(text, entry.name, entry.keys)
                changed.append(entry.name)
            elif there[entry.name].keys != entry.keys:
                place = there[entry.name].place
                raise AscendError(
                    f"{place}: another data set is called `{entry.name}`; nothing was written",
                    f"llamafactory-ascend data remove {entry.name} --dataset-dir {dataset_dir}",
                )
        for source, target in copies:
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy(source, target)
        if changed:
            _replace(file, text)
        return changed


@contextmanager
def _held(dataset_dir: Path) -> Iterator[None]:
    """Keep other commands away between reading dataset_info.json and writing it."""
    from llamafactory_ascend.cli import data_files

    if not dataset_dir.is_dir():
        raise AscendError(f"there is no folder {dataset_dir.resolve()}")
    with data_files.alone(dataset_dir):
        yield


def _text(file: Path) -> str:
    """Return a file's text with its line ends as they are; a byte order mark goes, which the host dies of."""
    from llamafactory_ascend.checks.data import catalogue

    return catalogue.read_text(file)


def _copy(source: Path, target: Path) -> None:
    handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    os.close(handle)
    try:
        shutil.copyfile(source, scratch)
        shutil.copymode(source, scratch)
        Path(scratch).replace(target)
    finally:
        Path(scratch).unlink(missing_ok=True)


def _replace(file: Path, text: str) -> None:
    """Write a text in place of a file at once; what was there is kept beside it as .bak."""
    file = file.resolve()  # a link stays one
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as scratch:
        whole, backup = Path(scratch) / file.name, Path(scratch) / "bak"
        whole.write_bytes(text.encode("utf-8"))
        if file.exists():
            shutil.copymode(file, whole)
            shutil.copy2(file, backup)
            backup.replace(file.with_name(f"{file.name}.bak"))
        whole.replace(file)
