"""What batches of rows come to in tokens: sums that add up, whatever process counted them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llamafactory_ascend.checks.data.lengths import RowTokens, Turn
from llamafactory_ascend.checks.lengths.histogram import Histogram

LAST_TURN = 16  # turns behind it are counted together
EXAMPLES = 5
PERCENTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
KEEP = (0.95, 0.99, 1.0)


@dataclass
class Share:
    """An amount before `cutoff_len`, and what it leaves; `rows` that have any."""

    rows: int = 0
    total: int = 0
    kept: int = 0

    def add(self, total: int, kept: int) -> None:
        self.rows += 1
        self.total += total
        self.kept += kept

    def merge(self, other: "Share") -> None:
        self.rows += other.rows
        self.total += other.total
        self.kept += other.kept

    def as_dict(self) -> dict[str, int]:
        return {"rows": self.rows, "total": self.total, "kept": self.kept, "lost": self.total - self.kept}


@dataclass(frozen=True)
class Labels:
    """Which tokens of a row the host trains on.

    Attributes:
        on_prompt: `train_on_prompt`.
        end_before_turn: the template marks the end of an answer by the first token of the next prompt.
        last_only: `mask_history`.
    """

    on_prompt: bool = False
    end_before_turn: bool = False
    last_only: bool = False

    def count(self, pairs: Sequence[tuple[int, int]]) -> int:
        """Return how many labels the host sets for turns of these (prompt, answer) lengths."""
        order = list(reversed(pairs)) if self.last_only else list(pairs)
        found = int(self.end_before_turn)
        for place, (prompt, response) in enumerate(order):
            if self.on_prompt:
                found += prompt
            elif self.end_before_turn and place and prompt + response:
                found += 1
            found += 0 if self.last_only and place else response
        return found


@dataclass
class Totals:
    """The figures of a batch, of a data set, or of a training.

    Attributes:
        rows: rows that were read; `dropped`: those the host leaves out, `failed`: those it dies of.
        tokens: of a row as the host encodes it, before `cutoff_len`.
        needed: the smallest `cutoff_len` that cuts nothing off a row.
        over: rows that `cutoff_len` cuts.
        lengths, supervised, ends: tokens of rows, tokens with a label, ends of trained answers.
        turns: number of a turn (from 1) -> its trained answers in tokens.
        media: `image`, `video`, `audio` -> the tokens they are replaced by.
        blocks: packed sequences, `packed`: tokens in them, `tail`: tokens that are left out.
    """

    rows: int = 0
    dropped: int = 0
    failed: int = 0
    examples: list[str] = field(default_factory=list)
    tokens: Histogram = field(default_factory=Histogram)
    needed: Histogram = field(default_factory=Histogram)
    over: int = 0
    lengths: Share = field(default_factory=Share)
    supervised: Share = field(default_factory=Share)
    ends: Share = field(default_factory=Share)
    turns: dict[int, Share] = field(default_factory=dict)
    media: dict[str, Share] = field(default_factory=dict)
    blocks: int = 0
    packed: int = 0
    tail: int = 0

    @property
    def kept(self) -> int:
        """Rows that are trained on."""
        return self.tokens.rows

    def see(self, row: RowTokens, cutoff_len: int, labels: Labels, place: str) -> None:
        """Add a row of a conversation, or a question with an answer."""
        tokens = row.overhead + sum(turn.prompt + turn.response for turn in row.turns)
        self.rows += 1
        self.tokens.add(tokens, place)
        self.needed.add(row.needed, place)
        self.over += row.needed > cutoff_len
        self.lengths.add(tokens, row.kept)
        whole = labels.count([(turn.prompt, turn.response) for turn in row.turns])
        self.supervised.add(
            whole, labels.count([(turn.prompt_kept, turn.response_kept) for turn in row.turns])
        )
        first = len(row.turns) - len(row.trained) + 1
        for number, turn in enumerate(row.trained, first):
            self._see_turn(min(number, LAST_TURN + 1), turn)

    def _see_turn(self, number: int, turn: Turn) -> None:
        self.turns.setdefault(number, Share()).add(turn.response, turn.response_kept)
        if turn.response:
            self.ends.add(1, int(turn.response_kept == turn.response))

    def see_text(self, tokens: int, kept: int, place: str) -> None:
        """Add a text of stage pt: every token is trained on, its end token last."""
        self.rows += 1
        self.tokens.add(tokens, place)
        self.needed.add(tokens, place)
        self.over += kept < tokens
        for share in (self.lengths, self.supervised):
            share.add(tokens, kept)
        self.ends.add(1, int(kept == tokens))

    def drop(self, reason: str, failed: bool = False) -> None:
        """Take note of a row that is not trained on."""
        self.rows += 1
        self.failed += failed
        self.dropped += not failed
        if len(self.examples) < EXAMPLES:
            self.examples.append(reason)

    def merge(self, other: "Totals") -> None:
        for name in ("rows", "dropped", "failed", "over", "blocks", "packed", "tail"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("tokens", "needed", "lengths", "supervised", "ends"):
            getattr(self, name).merge(getattr(other, name))
        for name in ("turns", "media"):
            for key, share in getattr(other, name).items():
                getattr(self, name).setdefault(key, Share()).merge(share)
        self.examples = [*self.examples, *other.examples][:EXAMPLES]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "rows": self.rows,
            "kept": self.kept,
            "dropped": self.dropped,
            "failed": self.failed,
            "examples": self.examples,
            "tokens": self.lengths.total,
            "tokens_kept": self.lengths.kept,
            "mean": round(self.tokens.total / self.kept, 1) if self.kept else 0,
            "percentiles": {
                "max" if part == 1 else f"{part:.0%}".rstrip("%"): self.tokens.percentile(part)
                for part in PERCENTILES
            },
            "longest_row": self.tokens.longest_at,
            "over_cutoff": self.over,
            "cutoff_len_that_keeps": {f"{part:.0%}": self.needed.percentile(part) for part in KEEP},
            "supervised": self.supervised.as_dict(),
            "ends": self.ends.as_dict(),
            "turns": {
                f"{number}" if number <= LAST_TURN else f"above {LAST_TURN}": self.turns[number].as_dict()
                for number in sorted(self.turns)
            },
            "media": {name: share.as_dict() for name, share in self.media.items()},
            "blocks": self.blocks,
            "packed_tokens": self.packed,
            "dropped_tail": self.tail,
        }
