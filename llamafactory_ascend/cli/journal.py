"""What was asked and answered so far, one line each, so that an interruption costs no answer twice."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from llamafactory_ascend.cli import data_files
from llamafactory_ascend.cli.question_answers import Pairs
from llamafactory_ascend.errors import AscendError


class Journal:
    """Passages that are done.

    Attributes:
        pairs: hash of a passage -> what was answered.
    """

    def __init__(self, file: Path, pairs: dict[str, Pairs], lines: BinaryIO) -> None:
        self.file, self.pairs, self._lines = file, pairs, lines

    def add(self, passage: str, pairs: Pairs) -> None:
        """Write what was answered; when this returns, it is on the disk."""
        self.write({"passage": passage, "pairs": pairs.valid, "rejected": pairs.rejected})
        self.pairs[passage] = pairs

    def write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False) + "\n"
        self._lines.write(text.encode("utf-8", "surrogatepass"))
        self._lines.flush()
        os.fsync(self._lines.fileno())

    def remove(self) -> None:
        """Everything that was answered is elsewhere now."""
        self.file.unlink(missing_ok=True)


@contextmanager
def opened(file: Path, settings: Mapping[str, Any], anew: bool) -> Iterator[Journal]:
    """Open a journal and read what is in it; the file is removed again where nothing was answered.

    Raises:
        AscendError: it was begun with other settings, it is another file, or another process writes it.
    """
    with file.open("ab+") as lines, data_files.alone(file, wait=False):
        lines.seek(0)
        data = b"" if anew else lines.read()
        pairs = _read(file, data, settings) if data else {}
        lines.truncate(data.rfind(b"\n") + 1)  # the last line may be half of one
        journal = Journal(file, pairs, lines)
        if not data:
            journal.write({"settings": dict(settings)})
        try:
            yield journal
        finally:
            if not journal.pairs:
                journal.remove()


def _read(file: Path, data: bytes, settings: Mapping[str, Any]) -> dict[str, Pairs]:
    """Return what was answered; a last line that was cut off is asked for again."""
    head, *lines = data.split(b"\n")
    try:
        before = json.loads(head)["settings"]
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
            one = json.loads(line.decode("utf-8", "surrogatepass"))
            found[str(one["passage"])] = Pairs(one["pairs"], one["rejected"])
        except (ValueError, KeyError, TypeError):
            continue
    return found
