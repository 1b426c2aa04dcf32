"""What was asked and answered so far, one line each, so that an interruption costs no answer twice."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from llamafactory_ascend.cli.question_answers import Pairs
from llamafactory_ascend.errors import AscendError


class Journal:
    """Passages that are done.

    Attributes:
        pairs: hash of a passage -> what was answered.
    """

    def __init__(self, file: Path, pairs: dict[str, Pairs], lines: TextIO) -> None:
        self.file, self.pairs, self._lines = file, pairs, lines

    def add(self, passage: str, pairs: Pairs) -> None:
        """Write what was answered; when this returns, it is on the disk."""
        line = {"passage": passage, "pairs": pairs.valid, "rejected": pairs.rejected}
        self._lines.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        self.pairs[passage] = pairs


@contextmanager
def opened(file: Path, settings: Mapping[str, Any], anew: bool) -> Iterator[Journal]:
    """Open a journal and read what is in it; the file is removed again where nothing was answered.

    Raises:
        AscendError: it was begun with other settings, or it is another file.
    """
    pairs = {} if anew or not file.exists() else _read(file, settings)
    head = json.dumps({"settings": dict(settings)}, ensure_ascii=False)
    scratch = file.with_name(f"{file.name}.new")
    # Written afresh: the last line may be half of one.
    with scratch.open("w", encoding="utf-8") as lines:
        lines.write(head + "\n")
        journal = Journal(file, {}, lines)
        for passage, found in pairs.items():
            line = {"passage": passage, "pairs": found.valid, "rejected": found.rejected}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            journal.pairs[passage] = found
        lines.flush()
        os.fsync(lines.fileno())
        scratch.replace(file)
        try:
            yield journal
        finally:
            if not journal.pairs:
                file.unlink(missing_ok=True)


def _read(file: Path, settings: Mapping[str, Any]) -> dict[str, Pairs]:
    """Return what was answered; a last line that was cut off is asked for again."""
    with file.open(encoding="utf-8") as lines:
        try:
            before = json.loads(lines.readline())["settings"]
        except (ValueError, KeyError, TypeError):
            raise AscendError(f"{file} is no work of this command", "--force begins anew") from None
        for key, value in settings.items():
            if before.get(key) != value:
                raise AscendError(
                    f"{file} was begun with {key} {before.get(key)}, now it is {value}",
                    f"--{key} {before.get(key)} goes on, --force begins anew",
                )
        found = {}
        for line in lines:
            try:
                one = json.loads(line)
                found[str(one["passage"])] = Pairs(one["pairs"], one["rejected"])
            except (ValueError, KeyError, TypeError):
                continue
    return found
