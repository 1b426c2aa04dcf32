"""What a check of a data set saw, and how far it may go before it is an error."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["note", "warning", "error"]


@dataclass(frozen=True)
class Problem:
    """One finding: `message` says what and where, `next` what to type; `kind` is for programs."""

    level: Level
    kind: str
    message: str
    next: str = ""

    def sentence(self) -> str:
        return f"{self.message}; {self.next}" if self.next else self.message

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """Shares from 0 to 1 above which a finding is an error.

    Attributes:
        dropped: rows that the host leaves out.
        empty: rows with an empty question or answer.
        leaked: evaluation rows whose question is in a training set.
        lost: tokens of answers that `cutoff_len` cuts off.
        examples: rows that a finding names at most.
    """

    dropped: float = 0.1
    empty: float = 0.1
    leaked: float = 1.0
    lost: float = 1.0
    examples: int = 5


@dataclass
class Tally:
    """Rows by reason: all are counted, the first few are kept to be named."""

    examples: int = 5
    counts: Counter[str] = field(default_factory=Counter)
    rows: dict[str, list[int]] = field(default_factory=dict)

    def add(self, reason: str, row: int) -> None:
        self.counts[reason] += 1
        named = self.rows.setdefault(reason, [])
        if len(named) < self.examples:
            named.append(row)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def describe(self) -> str:
        """Return "rows 1, 7: reason (2); row 4: other reason" with counts where not every row is named."""
        return "; ".join(
            f"{name_rows(self.rows[reason], count)}: {reason}" for reason, count in self.counts.most_common()
        )


def name_rows(rows: list[int], count: int) -> str:
    """Return "row 3", "rows 1 and 4" or "rows 1, 4, 5 and 20 more"; rows count from 0."""
    shown = [str(row) for row in rows]
    if count > len(rows):
        shown.append(f"{count - len(rows):,} more")
    if len(shown) == 1:
        return f"row {shown[0]}"
    return f"rows {', '.join(shown[:-1])} and {shown[-1]}"


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def percent(part: int, whole: int) -> str:
    value = 100 * share(part, whole)
    return f"{value:.0f} %" if value in (0, 100) or 1 <= value <= 99 else f"{value:.2g} %"
