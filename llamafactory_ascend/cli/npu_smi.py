"""What ``npu-smi info`` says: chips with their health and memory, and the processes on them."""

import re
from dataclasses import dataclass

# | 0     910B3               | OK            | 95.2        48                0    / 0             |
CHIP = re.compile(r"\|\s*(\d+)\s+(\S+)\s*\|\s*([A-Za-z]\w*)\s*\|")
# | 0                         | 0000:C1:00.0  | 0           0    / 0          3389 / 65536         |
BUS = re.compile(r"\|[\d\s]+\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+\s*\|(?P<usage>[^|]*)\|")
USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
# | 2       0                 | 12345         | python                   | 3000                    |
PROCESS = re.compile(r"\|\s*(\d+)\s+\d+\s*\|\s*(\d+)\s*\|\s*(\S[^|]*?)\s*\|\s*(\d+)\s*\|")


@dataclass(frozen=True)
class Chip:
    """One NPU.

    Attributes:
        number: its logical id.
        name: e.g. "910B3".
        health: "OK", "Warning", "Alarm", "Critical", "UNKNOWN".
        used: MB of its memory in use.
        total: MB of its memory.
    """

    number: int
    name: str
    health: str
    used: int
    total: int


@dataclass(frozen=True)
class Process:
    """A process on an NPU; in a container its id is the one of the host, or 0."""

    chip: int
    pid: int
    name: str
    megabytes: int


@dataclass(frozen=True)
class Smi:
    """Everything the table holds that a training cares about."""

    chips: tuple[Chip, ...]
    processes: tuple[Process, ...]


def parse(text: str) -> Smi:
    """Read the table that ``npu-smi info`` prints; lines of an unknown form are passed over."""
    chips: list[Chip] = []
    processes: list[Process] = []
    head: tuple[str, ...] | None = None
    for line in text.splitlines():
        if found := PROCESS.match(line):
            chip, pid, name, megabytes = found.groups()
            processes.append(Process(int(chip), int(pid), name, int(megabytes)))
        elif found := CHIP.match(line):
            head = found.groups()
        elif head and (found := BUS.match(line)):
            # The last pair is the memory a training uses: HBM where there is some, else the chip's DDR.
            pairs = USAGE.findall(found["usage"]) or [("0", "0")]
            number, name, health = head
            chips.append(Chip(int(number), name, health, *(int(size) for size in pairs[-1])))
            head = None
    return Smi(tuple(chips), tuple(processes))
