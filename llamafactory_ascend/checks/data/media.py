"""Pictures, videos and audio of rows: are they there, and does every placeholder have one?"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamafactory_ascend.checks.data.problem import Limits, Problem, Tally, name_rows
from llamafactory_ascend.checks.data.schema import MEDIA, Layout, kind

REMEMBERED = 100_000  # paths; a set with more of them looks some up again


@dataclass
class Media:
    """What the media of a data set come to; `see` each row, then ask for `problems`.

    Attributes:
        folder: the `media_dir`, where the host looks first; then it takes a path as it is written.
        placeholders: column -> what stands for one of its files in a text.
    """

    layout: Layout
    folder: Path
    placeholders: Mapping[str, str] = field(default_factory=lambda: placeholders(os.environ))
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.columns = {name: key for name in MEDIA if (key := self.layout.columns[name])}
        examples = self.limits.examples
        self.shape, self.count, self.unlisted = Tally(examples), Tally(examples), Tally(examples)
        self.missing: list[tuple[int, str]] = []
        self.missing_rows = 0
        self.known: dict[str, bool] = {}

    def see(self, number: int, row: Mapping[str, Any]) -> bool:
        """Take a row in; True where all its media are there."""
        text, whole = "".join(texts_of(row, self.layout)), True
        for name in MEDIA:
            wanted = text.count(self.placeholders[name])
            key = self.columns.get(name)
            if key is None:
                if wanted:
                    self.unlisted.add(f"`{self.placeholders[name]}` and no `{name}` in `columns`", number)
                continue
            value = row.get(key)
            if value is not None and not isinstance(value, list):
                self.shape.add(f"`{key}` is {kind(value)}, must be a list", number)
                value = [value]
            files = value or []
            if len(files) != wanted:
                self.count.add(
                    f"{_amount(len(files), name)} and {_amount(wanted, self.placeholders[name])}", number
                )
            absent = [path for path in paths_of(files) if not self.exists(path)]
            whole = whole and len(files) == wanted and not absent
            if absent:
                self.missing_rows += 1
                if len(self.missing) < self.limits.examples:
                    self.missing.append((number, absent[0]))

        return whole

    def exists(self, path: str) -> bool:
        if path not in self.known:
            if len(self.known) >= REMEMBERED:
                self.known.clear()
            self.known[path] = any(
                os.path.isfile(one)  # noqa: PTH113 - like the host, False for what can be no path at all
                for one in (self.folder / path, path)
            )
        return self.known[path]

    def problems(self, hint: str) -> list[Problem]:
        found = []
        if self.shape.total:
            found.append(Problem("error", "media_type", self.shape.describe(), 'write `["FILE"]`'))
        if self.missing:
            path = self.missing[0][1]
            places = f"neither {self.folder / path} nor {Path(path).absolute()} exists"
            message = (
                f"{name_rows([row for row, _ in self.missing], self.missing_rows)}: file not found: {places}"
            )
            found.append(Problem("error", "media_missing", message, hint))
        if self.count.total:
            message = self.count.describe()
            found.append(
                Problem("error", "media_count", message, "one placeholder in the text for each file")
            )
        if self.unlisted.total:
            found.append(Problem("warning", "media_column", self.unlisted.describe()))
        return found


def placeholders(environment: Mapping[str, str]) -> dict[str, str]:
    """Return column -> placeholder; the host lets the environment name others."""
    return {name: environment.get(f"{name[:-1].upper()}_PLACEHOLDER", f"<{name[:-1]}>") for name in MEDIA}


def paths_of(files: list[Any]) -> Iterator[str]:
    """Yield the paths among what a row lists; a video may be a list of its frames, other values are bytes."""
    for file in files:
        if isinstance(file, str):
            yield file
        elif isinstance(file, list):
            yield from (frame for frame in file if isinstance(frame, str))


def texts_of(row: Mapping[str, Any], layout: Layout) -> Iterator[str]:
    """Yield the texts in which placeholders count: questions, answers, history; not the system's."""
    columns, tags = layout.columns, layout.tags
    if layout.formatting == "alpaca":
        names = ("prompt", "query", *(("chosen",) if layout.ranking else ("response",)))
        values = [row.get(columns[name] or "") for name in names]
        history = row.get(columns["history"] or "") or []
        values += [part for turn in history for part in turn]
    else:
        messages = row.get(columns["messages"] or "") or []
        values = [
            message.get(tags["content_tag"])
            for message in messages
            if message.get(tags["role_tag"]) != tags["system_tag"]
        ]
        chosen = row.get(columns["chosen"] or "")
        values += [chosen.get(tags["content_tag"])] if isinstance(chosen, Mapping) else []
    return (value for value in values if isinstance(value, str))


def _amount(count: int, what: str) -> str:
    if what.startswith("<"):
        return f"no `{what}`" if not count else f"{count} `{what}`"
    word = what[:-1] if what != "audios" else "audio"
    return f"no {word}" if not count else f"one {word}" if count == 1 else f"{count} {what}"
