"""What ``npu-smi info`` says: chips with their health and memory, and the processes on them."""

import re
from dataclasses import dataclass

# | 0     910B3               | OK            | 95.2        48                0    / 0             |
CHIP = re.compile(r"\|\s*(\d+)\s+(\S+)\s*\|\s*([A-Za-z]\w*)\s*\|")
# | 0                         | 0000:C1:00.0  | 0           0    / 0          3389 / 65536         |
# | 1     3                   | 0000:9F:00.0  | ...   of two chips on a card: its index there, its device
BUS = re.compile(
    r"\|\s*(?P<index>\d+)(?:\s+(?P<device>\d+))?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+\s*\|(?P<usage>[^|]*)\|"
)
USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
# | 2       0                 | 12345         | python                   | 3000                    |
PROCESS = re.compile(r"\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*(\S[^|]*?)\s*\|\s*(\d+)\s*\|")


@dataclass(frozen=True)
class Chip:
    """One NPU.

    Attributes:
        number: of its card.
        index: on its card, which can hold two.
        device: what ASCEND_RT_VISIBLE_DEVICES calls it.
        name: e.g. "910B3".
        health: "OK", "Warning", "Alarm", "Critical", "UNKNOWN".
        used: MB of its memory in use.
        total: MB of its memory.
    """

    number: int
    index: int
    device: int
    name: str
    health: str
    used: int
    total: int


@dataclass(frozen=True)
class Process:
    """A process on an NPU; in a container its id is the one of the host, or 0."""

    number: int
    index: int
    pid: int
    name: str
    megabytes: int


@dataclass(frozen=True)
class Smi:
    """Everything the table holds that a training cares about."""

    chips: tuple[Chip, ...]
    processes: tuple[Process, ...]

    def device(self, number: int, index: int) -> int:
        """Return what ASCEND_RT_VISIBLE_DEVICES calls a chip of a card."""
        known = {(chip.number, chip.index): chip.device for chip in self.chips}
        return known.get((number, index), number)


def parse(text: str) -> Smi:
    """Read the table that ``npu-smi info`` prints; lines of an unknown form are passed over."""
    chips: list[Chip] = []
    processes: list[Process] = []
    head: tuple[str, ...] | None = None
    for line in text.splitlines():
        if found := PROCESS.match(line):
            number, index, pid, name, megabytes = found.groups()
            processes.append(Process(int(number), int(index), int(pid), name, int(megabytes)))
        elif found := CHIP.match(line):
            head = found.groups()
        elif head and (found := BUS.match(line)):
            # The last pair is the memory a training uses: HBM where there is some, else the chip's DDR.
            pairs = USAGE.findall(found["usage"]) or [("0", "0")]
            number, name, health = head
            index, device = int(found["index"]), int(found["device"] or number)
            used, total = (int(size) for size in pairs[-1])
            chips.append(Chip(int(number), index, device, name, health, used, total))
            head = None
    return Smi(tuple(chips), tuple(processes))
