"""One data set from its entry to its last row: everything that is checked, in the order it is found."""

import difflib
import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llamafactory_ascend.checks.data import roles, schema, tables
from llamafactory_ascend.checks.data.catalogue import Entry, climbs_out
from llamafactory_ascend.checks.data.json_rows import Row, Watch
from llamafactory_ascend.checks.data.leaks import Leaks
from llamafactory_ascend.checks.data.lengths import Blocks, Lengths, RowTokens, most_tokens
from llamafactory_ascend.checks.data.media import Media
from llamafactory_ascend.checks.data.problem import Limits, Problem, Tally
from llamafactory_ascend.checks.data.rows import Rows, question_of

LOOK_AT_CLOCK = 64  # rows
Count = Callable[[int, Mapping[str, Any]], RowTokens]


@dataclass(frozen=True)
class Request:
    """What a data set is checked for.

    Attributes:
        media_dir: where media of the user's own sets are looked for first; None: beside their entry, as
            those of a fragment always are.
        count: row -> its tokens, where a tokenizer is at hand.
        packing: stage pt joins its texts.
        batch: rows that are joined together.
        max_samples: rows of a set that are used; the others are read and must be whole, no more.
    """

    stage: str = "sft"
    cutoff_len: int = 2048
    media_dir: Path | None = None
    limits: Limits = field(default_factory=Limits)
    count: Count | None = None
    packing: bool = True
    batch: int = 1000
    max_samples: int | None = None


@dataclass(frozen=True)
class SetCheck:
    """The verdict on one data set.

    Attributes:
        place: file and line of its entry.
        rows, kept: rows that were looked at, and those of them that the host trains on.
        unused: rows behind `max_samples`.
        complete: all rows were read.
    """

    name: str
    place: str
    path: str
    rows: int
    kept: int
    unused: int
    complete: bool
    seconds: float
    problems: tuple[Problem, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(
    entry: Entry,
    request: Request,
    leaks: Leaks | None = None,
    evaluation: bool = False,
    deadline: float | None = None,
    watch: Watch | None = None,
) -> SetCheck:
    """Check one data set.

    Args:
        leaks: compares the questions of evaluation sets, which must come first, with those of training sets.
        evaluation: the set is an evaluation set.
        deadline: ``time.monotonic()`` at which reading stops.
        watch: told of every piece of bytes that was read.
    """
    started = time.monotonic()
    problems = schema.problems(entry.name, entry.keys, request.stage)
    files: list[Path] = []
    if not any(problem.level == "error" for problem in problems):
        found = path_problems(entry)
        if entry.path is not None and not any(problem.level == "error" for problem in found):
            files = tables.files_of(entry.path)
            wrong = tables.type_problems(files)
            found += wrong
            files = [] if wrong else files
        problems += found
    reading = Reading(entry, request, leaks, evaluation)
    complete = reading.read(files, deadline, watch) if files else not problems
    problems += reading.problems(complete) if files else []
    return SetCheck(
        entry.name,
        entry.place,
        str(entry.path or ""),
        reading.rows.seen,
        reading.rows.kept,
        reading.rows.unused,
        complete,
        round(time.monotonic() - started, 3),
        tuple(problems),
    )


class Reading:
    """The state of going through the rows of one data set."""

    def __init__(self, entry: Entry, request: Request, leaks: Leaks | None, evaluation: bool) -> None:
        self.entry, self.request, self.leaks, self.evaluation = entry, request, leaks, evaluation
        keys = entry.keys if isinstance(entry.keys, Mapping) else {}
        self.layout = schema.layout(keys)
        self.used = None if keys.get("num_samples") else request.max_samples  # drawn ones may be any
        limits = request.limits
        self.broken: list[Problem] = []
        self.unencoded = Tally(limits.examples)
        self.rows = Rows(self.layout, request.stage, limits)
        media_dir = request.media_dir if entry.source.origin == "yours" else None
        self.media = Media(self.layout, media_dir or entry.folder, limits=limits)
        self.lengths = Lengths(request.cutoff_len, limits)
        self.blocks = Blocks(request.cutoff_len, request.count is not None, request.packing, request.batch)

    def read(self, files: list[Path], deadline: float | None, watch: Watch | None) -> bool:
        """Go through all rows; stop at the deadline, or after a few places where a file cannot be read.

        Returns:
            True where nothing was left out.
        """
        for item in tables.read(files, watch):
            if isinstance(item, Problem):
                self.broken.append(item)
                if len(self.broken) >= self.request.limits.examples:
                    return False
                continue
            self._take(item)
            if deadline is not None and not item.number % LOOK_AT_CLOCK and time.monotonic() > deadline:
                return False
        return not self.broken

    def _take(self, item: Row) -> None:
        number, row = item.number, item.value
        if self.used is not None and self.rows.seen >= self.used:
            self.rows.pass_by(number, row)
            return
        if not self.rows.see(number, row):
            return
        if not self.media.see(number, row):
            return
        if self.leaks is not None and (question := question_of(row, self.layout)):
            see = self.leaks.see_evaluation if self.evaluation else self.leaks.see_training
            see(self.entry.name, number, question)
        counted = self._count(number, row)
        if self.request.stage == "pt":
            exact = sum(turn.prompt for turn in counted.turns) if counted else None
            self.blocks.see(most_tokens(self._text(row)) if exact is None else exact)
        elif counted:
            self.lengths.see(counted)

    def _count(self, number: int, row: Mapping[str, Any]) -> RowTokens | None:
        if self.request.count is None:
            return None
        try:
            return self.request.count(number, row)
        except Exception as error:  # what the host raises at this row, it would raise in a training too
            cause = " ".join(str(error).split())[:200]
            self.unencoded.add(f"no tokens can be made of it: {type(error).__name__}: {cause}", number)
            return None

    def _text(self, row: Mapping[str, Any]) -> str:
        columns, tags = self.layout.columns, self.layout.tags
        if self.layout.formatting == "alpaca":
            parts = [row.get(columns[name] or "") for name in ("prompt", "query")]
            return "\n".join(part for part in parts if part)
        return str(row[columns["messages"] or ""][0].get(tags["content_tag"]))

    def _media_hint(self) -> str:
        if self.entry.source.origin == "yours":
            return "set `media_dir`, or repair the paths"
        said = self.entry.keys.get("description", "")
        return f"media of a fragment lie in its own folder{f'; its entry says: {said}' if said else ''}"

    def problems(self, complete: bool) -> list[Problem]:
        """Return what was found; without a verdict on what rows that were not read may change."""
        found = list(self.broken)
        if not self.rows.seen and complete:
            found.append(Problem("error", "no_rows", f"{self.entry.path} holds no rows"))
        mismatch = roles.mismatch(self.rows.roles, self.rows.message_keys, self.layout)
        found += [mismatch] if mismatch else []
        found += self.rows.problems(complete) + self.media.problems(self._media_hint())
        found += self.lengths.problems()
        if self.unencoded.total:
            found.append(Problem("error", "tokens", self.unencoded.describe()))
        return found + (self.blocks.problems() if self.request.stage == "pt" and complete else [])


def path_problems(entry: Entry) -> list[Problem]:
    """Return what is wrong with where an entry's file is."""
    path = entry.path
    if path is None:
        source = next((key for key in schema.SOURCES if key in entry.keys), "its source")
        message = (
            f"`{source}` names no local file: its rows are NOT checked, a fault in them ends the training"
        )
        return [Problem("note", "remote", message)]
    found = []
    if climbs_out(entry):
        message = f"`file_name` leads out of {entry.folder}: {entry.keys['file_name']}"
        found.append(
            Problem("warning", "climbs_out", message, "an installed fragment would be refused for it")
        )
    if not os.path.exists(path):  # noqa: PTH110 - False for any name that cannot be, where Path raises
        link = f", a link to {os.readlink(path)}," if os.path.islink(path) else ""  # noqa: PTH114, PTH115
        message = f"file {os.path.abspath(path)}{link} does not exist"  # noqa: PTH100
        said = str(entry.keys.get("description", "")) if entry.source.origin != "yours" else ""
        following = f"its entry says: {said}" if said else nearest_files(path)
        found.append(Problem("error", "no_file", message, following))
    elif path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        found.append(Problem("error", "file", f"folder {path} cannot be read: {os.strerror(errno.EACCES)}"))
    elif not tables.files_of(path):
        found.append(Problem("error", "no_file", f"folder {path} is empty"))
    return found


def nearest_files(path: Path) -> str:
    """Return the names in a file's folder that are nearest to its own, or what there is instead."""
    if not path.parent.is_dir():
        return f"there is no folder {os.path.abspath(path.parent)}"  # noqa: PTH100 - no loop of links stops it
    there = [one for one in tables.files_of(path.parent) if os.path.exists(one)]  # noqa: PTH110
    names = [one.name for one in there if not one.name.startswith("dataset_info")]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if near:
        return f"nearest: {', '.join(near)}"
    return (
        f"the folder holds: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        if names
        else "it is empty"
    )


def exit_code(problems: Iterable[Problem]) -> int:
    """Return 2 for an error, 1 for a warning, 0 for neither."""
    levels = {problem.level for problem in problems}
    return 2 if "error" in levels else 1 if "warning" in levels else 0
