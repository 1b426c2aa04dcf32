"""Rows of .json and .jsonl files, one at a time: a file of any size takes the memory of its longest row."""

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llamafactory_ascend.checks.data import encodings
from llamafactory_ascend.checks.data.decoding import ROWS
from llamafactory_ascend.checks.data.problem import Problem

CHUNK = 1 << 20
LONGEST = 64 << 20  # characters of a row; one that has no end is an error before the memory is full
MARGIN = 16  # an error that close to the end of what was read may be the end itself
SHOWN = 60

Watch = Callable[[int], None]  # told the bytes that were read


@dataclass(frozen=True)
class Row:
    """A row with its number, counted from 0 through all files of a data set."""

    number: int
    value: Any


def read(file: Path, first: int = 0, watch: Watch | None = None) -> Iterator[Row | Problem]:
    """Yield the rows of a file, or what is wrong with it.

    Its first character decides, as with the host, and not its ending: ``[`` begins an array of rows, anything
    else rows one after the other, as a rule one per line. A broken line is left out and the next one read; a
    broken array ends.

    Args:
        first: the number of the first row.
    """
    found = encodings.of_file(file)
    with file.open("rb") as handle:
        start = len(codecs.BOM_UTF8) if found.codec == "UTF-8" and not found.readable else 0
        handle.seek(start)
        begin = _first_character(handle)
        handle.seek(start)
        if not found.readable and (
            begin == b"[" or not start
        ):  # rows behind a UTF-8 mark are read by the host
            yield encodings.problem(file, found)
        elif begin is None:
            yield Problem("error", "no_rows", f"{file} is empty")
        elif begin == b"[":
            yield from _read_array(Text(file, handle, watch), first)
        else:
            yield from _read_lines(file, handle, first, watch)


def _first_character(handle: BinaryIO) -> bytes | None:
    while character := handle.read(1):
        if not character.isspace():
            return character
    return None


def _read_lines(file: Path, handle: BinaryIO, first: int, watch: Watch | None) -> Iterator[Row | Problem]:
    number, line, start = first, 0, handle.tell()
    while data := handle.readline():
        line += 1
        try:
            text = data.decode("utf-8").rstrip("\r\n")  # an error at the end is one of this line
            if text.strip():
                yield Row(number, ROWS.decode(text))
                number += 1
        except UnicodeDecodeError:
            yield encodings.problem(file, encodings.guess(data), line)
            return
        except json.JSONDecodeError as error:
            if _goes_on(error, text, number == first):
                handle.seek(start)
                yield from _read_values(Text(file, handle, watch, line - 1), number)
                return
            yield broken(file, line, error.colno, text, explain(error, text))
            number += 1
        if watch:
            watch(len(data))
        start += len(data)


def _goes_on(error: json.JSONDecodeError, text: str, at_first: bool) -> bool:
    """True where a row is written over several lines, or another one follows it in its line."""
    ends = error.pos >= len(text.rstrip()) and text.lstrip()[:1] == "{"
    return (at_first and ends) or (error.msg == "Extra data" and text[error.pos] == "{")


def _read_values(text: "Text", first: int) -> Iterator[Row | Problem]:
    number = first
    try:
        text.skip()
        while text.peek():
            yield Row(number, text.value())
            number += 1
            text.skip()
    except Broken as error:
        yield error.problem


def _read_array(text: "Text", first: int) -> Iterator[Row | Problem]:
    number = first
    try:
        text.skip()
        text.take("[")
        text.skip()
        while text.peek() != "]":
            yield Row(number, text.value())
            number += 1
            text.skip()
            if text.peek() == "]":
                break
            text.take(",")
            text.skip()
            if text.peek() == "]":
                text.fail("a comma stands before `]`")
        text.take("]")
        text.skip()
        if text.peek():
            text.fail("something follows the end of the array")
    except Broken as error:
        yield error.problem


class Broken(Exception):
    """A file that cannot be read on; holds the problem to show."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class Text:
    """A file as text of which only the part in work is held, with the line and column of every place."""

    def __init__(self, file: Path, handle: BinaryIO, watch: Watch | None, lines: int = 0) -> None:
        self.file, self.handle, self.watch = file, handle, watch
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.held, self.at, self.ended = "", 0, False
        self.lines = lines  # newlines in what was let go
        self.before = ""  # the beginning of the line that `held` continues

    def more(self, size: int = CHUNK) -> bool:
        """Read on; False at the end of the file."""
        if self.ended:
            return False
        data = self.handle.read(size)
        if self.watch:
            self.watch(len(data))
        self._let_go()
        try:
            self.held += self.decoder.decode(data, final=not data)
        except UnicodeDecodeError:
            line = self.lines + self.held.count("\n") + 1
            raise Broken(encodings.problem(self.file, encodings.guess(data), line)) from None
        self.ended = not data
        return True

    def _let_go(self) -> None:
        gone = self.held[: self.at]
        self.lines += gone.count("\n")
        self.before = (
            (self.before + gone)[(self.before + gone).rfind("\n") + 1 :][-2 * SHOWN :]
            if gone
            else self.before
        )
        self.held, self.at = self.held[self.at :], 0

    def peek(self) -> str:
        while self.at >= len(self.held) and self.more():
            pass
        return self.held[self.at : self.at + 1]

    def skip(self) -> None:
        """Pass white space."""
        while (character := self.peek()) and character in " \t\r\n":
            self.at += 1

    def take(self, character: str) -> None:
        found = self.peek()
        if found != character:
            self.fail(
                f"`{character}` expected" if found else f"the file ends where `{character}` is expected"
            )
        self.at += 1

    def value(self) -> Any:
        """Return the value that begins here, reading on as far as it goes."""
        size = CHUNK
        if not self.peek():
            self.fail("the file ends where a row is expected")
        while True:
            try:
                value, end = ROWS.raw_decode(self.held, self.at)
            except json.JSONDecodeError as error:
                open_end = error.msg.startswith("Unterminated") or error.pos >= len(self.held) - MARGIN
                if open_end and len(self.held) - self.at < LONGEST and self.more(size):
                    size *= 2
                    continue
                if not error.msg.startswith("Unterminated"):
                    self.at = min(error.pos, len(self.held))
                self.fail(explain(error, self.held))
            if end == len(self.held) and self.more():  # a number may go on
                continue
            self.at = end
            return value

    def fail(self, what: str) -> None:
        """Raise Broken with the place where the text stands."""
        gone = self.held[: self.at]
        line = self.lines + gone.count("\n") + 1
        start = gone.rfind("\n") + 1
        column = self.at - start + 1 + (len(self.before) if not start else 0)
        end = self.held.find("\n", self.at)
        whole = (self.before if not start else "") + self.held[start : end if end >= 0 else None]
        raise Broken(broken(self.file, line, column, whole.rstrip("\r"), what))


def explain(error: json.JSONDecodeError, text: str) -> str:
    """Return in plain words what is wrong where JSON breaks off."""
    at = text[error.pos : error.pos + 1]
    before = text[: error.pos].rstrip()[-1:]
    if before == "," and at in ("}", "]"):
        return f"a comma stands before `{at}`"
    if error.msg == "Extra data":
        return "a comma follows the row" if at == "," else "something follows the row"
    if error.msg.startswith("Illegal trailing comma"):
        return "a comma stands before the end"
    return error.msg[:1].lower() + error.msg[1:]


def broken(file: Path, line: int, column: int, text: str, what: str) -> Problem:
    """Show where JSON breaks off: file:line:column and the line, or the part of it around the column."""
    return Problem("error", "json", f"{file}:{line}:{column}: {what}: {excerpt(text, column)}")


def excerpt(text: str, column: int) -> str:
    start = max(0, column - SHOWN)
    part = "".join(
        one if one.isprintable() else ascii(one)[1:-1] for one in text[start : column + SHOWN // 3]
    )
    return f"`{'...' if start else ''}{part}{'...' if column + SHOWN // 3 < len(text) else ''}`"
