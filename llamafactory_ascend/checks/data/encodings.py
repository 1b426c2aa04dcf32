"""Which encoding a text file is in. The host reads UTF-8 without a byte order mark and nothing else."""

import codecs
import shlex
from dataclasses import dataclass
from pathlib import Path

from llamafactory_ascend.checks.data.problem import Problem

HEAD = 1 << 16
MARKS = (  # UTF-32 before UTF-16, whose mark is the beginning of its own
    (codecs.BOM_UTF8, "UTF-8 with a byte order mark", "UTF-8"),
    (codecs.BOM_UTF32_LE, "UTF-32", "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32", "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16", "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16", "UTF-16"),
)


@dataclass(frozen=True)
class Encoding:
    """An encoding by its name for people and by the one that `iconv` and Python know."""

    name: str
    codec: str

    @property
    def readable(self) -> bool:
        """True where the host reads it."""
        return self.name == "UTF-8"


UTF8 = Encoding("UTF-8", "UTF-8")


def of_head(head: bytes) -> Encoding | None:
    """Return the encoding that a file's first bytes prove, None where they may be UTF-8 or another one."""
    for mark, name, codec in MARKS:
        if head.startswith(mark):
            return Encoding(name, codec)
    if b"\0" in head[:4]:  # text that begins with an ASCII character, two bytes wide
        little = head[1:2] == b"\0"
        return Encoding("UTF-16 without a byte order mark", "UTF-16LE" if little else "UTF-16BE")
    return None


def of_file(file: Path) -> Encoding:
    """Return the encoding of a file from its first bytes alone; what they leave open is taken for UTF-8."""
    with file.open("rb") as handle:
        return of_head(handle.read(4)) or UTF8


def guess(sample: bytes) -> Encoding | None:
    """Return the encoding of bytes that are no UTF-8, None where nothing fits.

    GB18030 contains GBK and GB2312. Nearly every pair of high bytes means something in it, so it counts only
    where what it gives are mostly common Chinese characters.
    """
    decoder = codecs.getincrementaldecoder("gb18030")()
    try:
        text = decoder.decode(sample)
    except UnicodeDecodeError:
        return None
    foreign = [character for character in text if ord(character) > 127]
    common = [one for one in foreign if "\u4e00" <= one <= "\u9fff" or "\u3000" <= one <= "\uffef"]
    return Encoding("GBK", "GB18030") if foreign and len(common) > 0.7 * len(foreign) else None


def problem(file: Path, found: Encoding | None, line: int | None = None) -> Problem:
    """Say which encoding a file is in and which command converts it."""
    where = f"{file}:{line}" if line else str(file)
    if found is None:
        message = f"{where} is not UTF-8, the only encoding that is read, nor any that is recognised"
        return Problem("error", "encoding", message, f"find out: file -i {quoted(file)}")
    return Problem(
        "error", "encoding", f"{where} is {found.name}, it must be plain UTF-8", conversion(file, found)
    )


def conversion(file: Path, found: Encoding) -> str:
    """Return the command that converts a file in place."""
    if found.codec == "UTF-8":
        return f"sed -i '1s/^\\xEF\\xBB\\xBF//' {quoted(file)}"
    name, new = quoted(file), quoted(file.with_name(f"{file.name}.utf8"))
    return f"iconv -f {found.codec} -t UTF-8 {name} > {new} && mv {new} {name}"


def quoted(file: Path) -> str:
    return shlex.quote(str(file))
