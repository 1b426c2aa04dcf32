"""Documents of a folder as text: .md and .txt in whatever encoding, in passages that overlap."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llamafactory_ascend.checks.data import encodings
from llamafactory_ascend.errors import AscendError

ENDINGS = (".md", ".txt")
OVERLAP = 4  # a passage begins with the last quarter of the one before
SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？；\n])")
BREAK = "\n\n"
LONG = 16  # characters of a token, on average, that no text has
TEXT = 0.97  # part of characters that people write, below which bytes are no text

Length = Callable[[str], int]


@dataclass(frozen=True)
class Document:
    """A file's text, and the encoding it was in; ``text`` is None where no encoding fits."""

    file: Path
    text: str | None
    encoding: str


def find(place: Path) -> list[Path]:
    """Return the documents of a folder and of those below it, in the order of their paths.

    A folder that cannot be opened is among them: reading it says why it is skipped.

    Raises:
        AscendError: there is none.
    """
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise AscendError(f"there is no folder {place.resolve()}")
    closed: list[Path] = []
    found: list[Path] = []
    for folder, _, names in os.walk(place, onerror=lambda error: closed.append(Path(error.filename))):
        files = [Path(folder) / name for name in names]
        found += [file for file in files if file.suffix.lower() in ENDINGS and file.is_file()]
    found += closed
    if not found:
        raise AscendError(f"{place} and the folders below it hold no {' or '.join(ENDINGS)} file")
    return sorted(found)


def read(file: Path) -> Document:
    """Decode a file: UTF-8 with or without a mark, UTF-16, UTF-32, GBK.

    Raises:
        OSError: it cannot be read.
    """
    data = file.read_bytes()
    found = encodings.of_head(data[:4]) if data[:4] else encodings.UTF8
    if found is None and b"\0" in data:
        found = _wide(data)
        if found is None:
            return Document(file, None, "none that is known: it holds zero bytes")
    if found is None:
        try:
            return Document(file, data.decode("utf-8"), "UTF-8")
        except UnicodeDecodeError:
            found = encodings.guess(data)
    if found is None:
        return Document(file, None, "neither UTF-8 nor GBK nor UTF-16")
    try:
        text = data.decode("utf-8-sig" if found.codec == "UTF-8" else found.codec)
    except UnicodeDecodeError as error:
        return Document(file, None, f"{found.name}, but broken at byte {error.start}")
    if not _is_text(text):
        return Document(file, None, f"{found.name} at first sight, but no text")
    return Document(file, text, found.name)


def _wide(data: bytes) -> encodings.Encoding | None:
    """Return the UTF-16 without a mark that bytes with zeros among them are; None: they are no text."""
    for codec in ("UTF-16LE", "UTF-16BE"):
        try:
            text = data.decode(codec)
        except UnicodeDecodeError:
            continue
        if _is_text(text) and ("\n" in text or " " in text):
            return encodings.Encoding("UTF-16 without a byte order mark", codec)
    return None


def _is_text(text: str) -> bool:
    """Say whether nearly all characters are letters, digits, marks and spaces, and none is a control code."""
    written = sum(one.isprintable() or one in "\t\n\r\f\ufeff" for one in text)
    return written >= TEXT * len(text) and "\0" not in text


def passages(text: str, most: int, length: Length) -> Iterator[str]:
    """Yield a document's paragraphs merged into passages, each beginning with what ended the one before.

    Whole pieces are repeated: sentences, as many as fit into a quarter.

    Args:
        most: the length of a passage, as `length` counts it.
    """
    held: list[tuple[str, int]] = []
    new = 0
    for piece in _pieces(text, most, length):
        if new and not _fits([*held, piece], most, length):
            yield join(held)
            held, new = _tail(held, most // OVERLAP, length), 0
            while held and not _fits([*held, piece], most, length):
                held = held[1:]
        held.append(piece)
        new += 1
    if new:
        yield join(held)


def _fits(held: "list[tuple[str, int]]", most: int, length: Length) -> bool:
    """Say whether pieces fit; they are joined and counted only where the sum of their lengths is near."""
    total = sum(size for _, size in held)
    if total <= 0.9 * most - 2 * len(held):
        return True
    return total <= 1.1 * most and length(join(held)) <= most


def _tail(held: "list[tuple[str, int]]", most: int, length: Length) -> "list[tuple[str, int]]":
    kept: list[tuple[str, int]] = []
    for piece in reversed(held[1:]):
        if length(join([piece, *kept])) > most:
            break
        kept.insert(0, piece)
    return kept


def join(held: "list[tuple[str, int]]") -> str:
    """Return pieces as text; each brings the space behind it along."""
    return "".join(text for text, _ in held).strip()


def _pieces(text: str, most: int, length: Length) -> Iterator[tuple[str, int]]:
    """Yield (text, length) of paragraphs, or of their sentences where they are longer than an eighth."""
    room = max(most // (2 * OVERLAP), 1)
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip()):
        paragraph = paragraph.strip()
        if not paragraph:
            continue
        whole = not _exceeds(paragraph, room, length)
        parts = [paragraph] if whole else list(_sentences(paragraph, room, length))
        for place, part in enumerate(parts, 1):
            piece = part + BREAK if place == len(parts) else part
            yield piece, length(piece)


def _sentences(paragraph: str, room: int, length: Length) -> Iterator[str]:
    """Yield parts of a paragraph that together are it: sentences, or as much of one as there is room for."""
    ends = [match.end() for match in SENTENCE.finditer(paragraph)] + [len(paragraph)]
    start = 0
    for end in ends:
        while start < end and _exceeds(paragraph[start:end], room, length):
            cut = start + _longest(paragraph[start:end], room, length)
            yield paragraph[start:cut]
            start = cut
        if start < end:
            yield paragraph[start:end]
        start = end


def _exceeds(text: str, room: int, length: Length) -> bool:
    """Say whether a text is longer; one of that many characters is not counted to its end."""
    return len(text) > LONG * room or length(text) > room


def _longest(text: str, room: int, length: Length) -> int:
    """Return how many characters fit, at least one; a cut is made behind a space where there is one."""
    low, high = 1, min(len(text), LONG * room)
    while low < high:
        middle = (low + high + 1) // 2
        if length(text[:middle]) <= room:
            low = middle
        else:
            high = middle - 1
    space = text.rfind(" ", low // 2, low)
    return space + 1 if space > 0 and low < len(text) else low
