"""Every data set a run can name: the user's dataset_info.json with the fragments that lie over it."""

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, Literal

from llamafactory_ascend.checks.data import encodings, json_rows
from llamafactory_ascend.checks.data.decoding import DECODER
from llamafactory_ascend.checks.data.schema import FILE_TYPES, SOURCES
from llamafactory_ascend.errors import AscendError

INFO = "dataset_info.json"
Origin = Literal["yours", "settings", "plugin", "shipped"]
SPACE = " \t\r\n"


@dataclass(frozen=True)
class Source:
    """A file of entries: the user's own, one of `ascend.dataset_info`, a plugin's, or the shipped one."""

    file: Path
    origin: Origin


@dataclass(frozen=True)
class Entry:
    """One data set: its keys as they are written, and where."""

    name: str
    keys: Any
    source: Source
    line: int

    @property
    def place(self) -> str:
        return f"{self.source.file}:{self.line}"

    @property
    def folder(self) -> Path:
        """Return the folder that its files and media are relative to."""
        return self.source.file.parent

    @property
    def path(self) -> Path | None:
        """Return its file or folder; None where its data is no local file."""
        keys = self.keys if isinstance(self.keys, Mapping) else {}
        first = next((key for key in SOURCES if key in keys), None)
        name = keys.get("file_name")
        return self.folder / name if first == "file_name" and isinstance(name, str) else None

    def as_host_reads(self) -> Any:
        """Return the keys, a fragment's with absolute paths: the host looks for files in another folder."""
        if not isinstance(self.keys, Mapping):
            return self.keys
        keys = dict(self.keys)
        if self.source.origin != "yours":
            for key in ("file_name", "script_url"):
                if isinstance(keys.get(key), str):
                    keys[key] = os.path.abspath(self.folder / keys[key])  # noqa: PTH100 - keeps links
        return keys


@dataclass
class Catalogue:
    """All entries by name, the sources they come from, and what was wrong with sources of others."""

    entries: dict[str, list[Entry]] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    missing: Path | None = None  # the user's dataset_info.json where there is none

    def find(self, name: str) -> Entry:
        """Return the data set of a name.

        A name of the user's that is shipped too means the user's: `data make` writes such entries.

        Raises:
            AscendError: there is none (with the nearest names), there are two, or it is an installed fragment
                whose file lies outside its folder.
        """
        found = self.entries.get(name, [])
        if not found:
            raise self.unknown(name)
        own = [entry for entry in found if entry.source.origin != "shipped"] or found
        if len(own) > 1:
            places = "".join(f"\n  {entry.place}" for entry in own)
            raise AscendError(f"two data sets are called `{name}`:{places}", "rename or remove one of them")
        if own[0].source.origin in ("plugin", "shipped") and climbs_out(own[0]):
            raise AscendError(
                f"{own[0].place}: `{name}` names a file outside its own folder: {own[0].keys['file_name']}",
                "an installed fragment may not; report it to who made it",
            )
        return own[0]

    def unknown(self, name: str) -> AscendError:
        bare, ending = os.path.splitext(name)  # noqa: PTH122 - a name, no path
        is_file = ending[1:] in FILE_TYPES
        by_file = [
            entry.name
            for entries in self.entries.values()
            for entry in entries
            if isinstance(entry.keys, Mapping) and entry.keys.get("file_name") == name
        ]
        near = by_file or difflib.get_close_matches(bare if is_file else name, self.entries, n=3, cutoff=0.6)
        what = f"there is no data set `{name}`"
        if near:
            what += f": did you mean {' or '.join(f'`{one}`' for one in near)}?"
        if is_file:
            what += " A data set is named without its file's ending"
            what += " and needs an entry in dataset_info.json" if not near else ""
        looked = "".join(f"\n  looked in {source.file}" for source in self.sources)
        if self.missing:
            looked += f"\n  {self.missing} does not exist"
        return AscendError(what + looked, "llamafactory-ascend data ls --dataset-dir DIR")


def sources(
    dataset_dir: Path,
    settings: Iterable[Path] = (),
    plugins: Iterable[Path] = (),
    shipped: Path | None = None,
) -> list[Source]:
    """Return the files that entries come from, the user's first; a folder stands for the one in it."""
    found = [Source(dataset_dir / INFO, "yours")]
    seen = {os.path.realpath(found[0].file)}
    for origin, files in (
        ("settings", settings),
        ("plugin", plugins),
        ("shipped", [shipped] if shipped else []),
    ):
        for given in files:
            file = given / INFO if given.is_dir() else given
            if os.path.realpath(file) not in seen:  # a file that is named twice holds nothing twice
                seen.add(os.path.realpath(file))
                found.append(Source(file, origin))  # type: ignore[arg-type]
    return found


def read(places: Sequence[Source]) -> Catalogue:
    """Read every source.

    Raises:
        AscendError: a file of the user's own cannot be read. A plugin's that cannot is a warning: a run that
            does not use it has nothing to do with it.
    """
    made = Catalogue()
    for source in places:
        if source.origin == "yours" and not source.file.exists():
            made.missing = source.file
            continue
        try:
            entries = read_source(source)
        except AscendError as error:
            if source.origin in ("yours", "settings"):
                raise
            made.warnings.append(str(error))
            continue
        made.sources.append(source)
        for entry in entries:
            made.entries.setdefault(entry.name, []).append(entry)
    return made


def read_source(source: Source) -> list[Entry]:
    """Return the entries of one file, a name that stands in it twice included.

    Raises:
        AscendError: it is missing, not UTF-8 or no JSON object (with file:line:column and the line).
    """
    text = read_text(source.file)
    try:
        found = members(text)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1] if text.splitlines() else ""
        what = json_rows.explain(error, text)
        raise AscendError(
            json_rows.broken(source.file, error.lineno, error.colno, line, what).message
        ) from None
    return [Entry(one.key, one.value, source, text.count("\n", 0, one.start) + 1) for one in found]


def read_text(file: Path) -> str:
    """Return the text of a dataset_info.json as it is, but for a byte order mark.

    Raises:
        AscendError: it is missing, or not UTF-8; with the command that converts it.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise AscendError(f"{file} cannot be read: {error.strerror}") from None
    found = encodings.of_head(data[:4])
    if found and found.codec != "UTF-8":
        wrong = encodings.problem(file, found)
        raise AscendError(wrong.message, wrong.next)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        wrong = encodings.problem(file, encodings.guess(data))
        raise AscendError(wrong.message, wrong.next) from None


@dataclass(frozen=True)
class Member:
    """A key and value of a JSON object with their place in its text: `text[start:end]`."""

    key: str
    value: Any
    start: int
    end: int


def members(text: str) -> list[Member]:
    """Return the members of the object that a text is, in order, keys that stand twice included.

    Raises:
        json.JSONDecodeError: the text is no JSON object.
    """
    return list(_members(text))


def _members(text: str) -> Iterator[Member]:
    at = _expect(text, _skip(text, 0), "{")
    at = _skip(text, at)
    if text[at : at + 1] == "}":
        _end(text, at + 1)
        return
    while True:
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        start = at
        key, at = scanstring(text, at + 1, True)
        at = _skip(text, _expect(text, _skip(text, at), ":"))
        value, at = DECODER.raw_decode(text, at)
        yield Member(key, value, start, at)
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            _end(text, at + 1)
            return
        at = _skip(text, _expect(text, at, ","))


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


def _expect(text: str, at: int, character: str) -> int:
    if text[at : at + 1] != character:
        raise json.JSONDecodeError(f"`{character}` expected", text, at)
    return at + 1


def _end(text: str, at: int) -> None:
    if _skip(text, at) < len(text):
        raise json.JSONDecodeError("Extra data", text, _skip(text, at))


def climbs_out(entry: Entry) -> bool:
    """True where an entry's file lies outside the folder of the file that names it."""
    name = entry.keys.get("file_name") if isinstance(entry.keys, Mapping) else None
    if not isinstance(name, str):
        return False
    return os.path.isabs(name) or Path(os.path.normpath(name)).parts[:1] == ("..",)  # noqa: PTH117
