"""How often each length occurs, in bounded memory: exact where it matters, rounded up where it is long."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

EXACT_BITS = 16  # lengths below 65,536 are kept as they are, longer ones to 16 leading bits


def rounded(length: int) -> int:
    """Return the length itself, or above 65,535 the next one of 16 leading bits: 0.003 % more at most."""
    shift = max(length.bit_length() - EXACT_BITS, 0)
    return -(-length >> shift) << shift


@dataclass
class Histogram:
    """Counts of lengths; two of them add up. No data set makes it larger than 32,768 counts per power of two.

    Attributes:
        counts: length (rounded up) -> rows.
        longest: the largest length, not rounded.
        longest_at: where it was seen first.
    """

    counts: Counter[int] = field(default_factory=Counter)
    total: int = 0
    longest: int = 0
    longest_at: str = ""

    @property
    def rows(self) -> int:
        return self.counts.total()

    def add(self, length: int, place: str = "") -> None:
        self.counts[rounded(length)] += 1
        self.total += length
        if length > self.longest:
            self.longest, self.longest_at = length, place

    def merge(self, other: "Histogram") -> None:
        self.counts.update(other.counts)
        self.total += other.total
        if other.longest > self.longest:
            self.longest, self.longest_at = other.longest, other.longest_at

    def percentile(self, part: float) -> int:
        """Return the smallest length that this part of the rows (0 to 1) does not exceed; 0 without rows."""
        wanted, so_far = math.ceil(part * self.rows), 0
        for length in sorted(self.counts):
            so_far += self.counts[length]
            if so_far >= wanted:
                return min(length, self.longest)
        return 0

    def above(self, length: int) -> int:
        """Return how many rows are longer; `length` must be below 65,536 for an exact answer."""
        return sum(count for one, count in self.counts.items() if one > length)

    def bins(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first length, last length, rows) of bins of one width, from the shortest to the longest row.

        The width is a round number, so that there are `count` bins at most.
        """
        if not self.counts:
            return
        low, high = min(self.counts), max(self.counts)
        width = _round_width((high - low + 1) / count)
        while high // width - low // width >= count:
            width = _round_width(width + 1)
        held: Counter[int] = Counter()
        for length, rows in self.counts.items():
            held[length // width] += rows
        for place in range(low // width, high // width + 1):
            yield place * width, (place + 1) * width - 1, held[place]


def _round_width(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is not below."""
    power: int = 10 ** max(math.ceil(math.log10(max(least, 1))) - 1, 0)
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)
