"""What `cutoff_len` leaves of each row, from the lengths of its turns in tokens."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamafactory_ascend.checks.data.problem import Limits, Problem, Tally, percent, share

Cut = Callable[
    [int, int, int], tuple[int, int]
]  # the host's infer_seqlen: prompt, answer, room -> what is kept
BATCH = 1000  # rows the host packs together in stage pt (preprocessing_batch_size)


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer in tokens, and how much of each is kept."""

    prompt: int
    response: int
    prompt_kept: int
    response_kept: int

    @property
    def lost(self) -> int:
        """Tokens of the answer that are cut off its end."""
        return self.response - self.response_kept


@dataclass(frozen=True)
class RowTokens:
    """A row in tokens.

    Attributes:
        row: its number, from 0.
        turns: in the order of the conversation.
        overhead: tokens beside the turns: a final end token, what a template puts before.
        last_only: `mask_history`: only the last answer is trained on.
        needed: the smallest `cutoff_len` that cuts nothing.
    """

    row: int
    turns: tuple[Turn, ...]
    overhead: int
    last_only: bool
    needed: int

    @property
    def trained(self) -> tuple[Turn, ...]:
        """Return the turns whose answers are trained on."""
        return self.turns[-1:] if self.last_only else self.turns

    @property
    def kept(self) -> int:
        return self.overhead + sum(turn.prompt_kept + turn.response_kept for turn in self.turns)

    @property
    def lost(self) -> int:
        """Tokens of trained answers that are cut off."""
        return sum(turn.lost for turn in self.trained)

    @property
    def vanished(self) -> tuple[int, ...]:
        """Return the numbers, from 1, of turns of which nothing is left."""
        return tuple(
            number
            for number, turn in enumerate(self.turns, start=1)
            if turn.response and not turn.prompt_kept and not turn.response_kept
        )


def count(
    row: int,
    pairs: Sequence[tuple[int, int]],
    overhead: int,
    cutoff_len: int,
    cut: Cut,
    last_only: bool = False,
) -> RowTokens:
    """Return what `cutoff_len` leaves of a row.

    Args:
        pairs: (prompt, answer) lengths of the turns, in their order.
        overhead: tokens that are counted before the first turn.
        cut: the host's division of the room that is left between prompt and answer.
    """
    needed = overhead + sum(prompt + response for prompt, response in pairs)
    while pairs and not _whole(pairs, keep(pairs, overhead, needed, cut, last_only)):
        needed += 1  # the host's division rounds down
    kept = keep(pairs, overhead, cutoff_len, cut, last_only)
    turns = tuple(Turn(*pair, *left) for pair, left in zip(pairs, kept, strict=True))
    return RowTokens(row, turns, overhead, last_only, needed)


def keep(
    pairs: Sequence[tuple[int, int]], overhead: int, cutoff_len: int, cut: Cut, last_first: bool
) -> list[tuple[int, int]]:
    """Return the kept lengths of each turn: turns take room one after the other until there is none.

    ``last_first`` (``mask_history``): the last turn takes first.
    """
    order = range(len(pairs) - 1, -1, -1) if last_first else range(len(pairs))
    kept = [(0, 0)] * len(pairs)
    total = overhead
    for place in order:
        if total >= cutoff_len:
            break
        kept[place] = cut(*pairs[place], cutoff_len - total)
        total += sum(kept[place])
    return kept


def _whole(pairs: Sequence[tuple[int, int]], kept: list[tuple[int, int]]) -> bool:
    return all(tuple(pair) == left for pair, left in zip(pairs, kept, strict=True))


@dataclass
class Lengths:
    """What `cutoff_len` does to the rows of a data set; `see` each, then ask for `problems`."""

    cutoff_len: int
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.rows = self.answers = self.lost = 0
        self.needed: Counter[int] = Counter()
        self.cut, self.vanished = Tally(self.limits.examples), Tally(self.limits.examples)
        self.last_only = False

    def see(self, row: RowTokens) -> None:
        self.rows += 1
        self.last_only = row.last_only
        self.needed[row.needed] += 1
        self.answers += sum(turn.response for turn in row.trained)
        self.lost += row.lost
        gone = {place for place in row.vanished if row.turns[place - 1] in row.trained}
        for place in sorted(gone):
            self.vanished.add(f"turn {place} of {len(row.turns)} vanishes", row.row)
        if any(turn.lost and turn.response_kept + turn.prompt_kept for turn in row.trained):
            self.cut.add("the answer loses its end", row.row)

    def enough(self, part: float) -> int:
        """Return the smallest `cutoff_len` that leaves this part of the rows whole."""
        wanted, so_far = math.ceil(part * self.rows), 0
        for length in sorted(self.needed):
            so_far += self.needed[length]
            if so_far >= wanted:
                return length
        return 0

    def problems(self) -> list[Problem]:
        if not self.lost:
            return []
        over = share(self.lost, self.answers) > self.limits.lost
        reasons = [tally.describe() for tally in (self.cut, self.vanished) if tally.total]
        message = (
            f"cutoff_len {self.cutoff_len} cuts off {percent(self.lost, self.answers)} of the tokens "
            f"of all answers ({self.lost:,} of {self.answers:,}), end tokens with them: {'; '.join(reasons)}"
        )
        hint = f"`cutoff_len: {self.enough(0.95)}` keeps 95 % of the rows whole, `{self.enough(1)}` all"
        if self.vanished.total and not self.last_only:
            hint += "; `mask_history: true` keeps the last turn, and trains on it alone"
        return [Problem("error" if over else "warning", "cutoff", message, hint)]


@dataclass
class Blocks:
    """Stage pt: texts joined and divided into blocks of `cutoff_len`, what is over of each batch left out.

    Attributes:
        exact: False where the tokens are not counted but bounded from above.
    """

    cutoff_len: int
    exact: bool
    packing: bool = True
    batch: int = BATCH

    def __post_init__(self) -> None:
        self.rows = self.tokens = self.blocks = 0
        self.open = self.largest = 0

    def see(self, tokens: int) -> None:
        self.rows += 1
        self.tokens += tokens
        self.open += tokens
        self.largest = max(self.largest, self.open)
        if self.rows % self.batch == 0:
            self._close()

    def _close(self) -> None:
        self.blocks += self.open // self.cutoff_len
        self.open = 0

    def problems(self) -> list[Problem]:
        self._close()
        if not self.rows or not self.packing:
            return []
        amount = f"{self.tokens:,} tokens" if self.exact else f"at most {self.tokens:,} tokens"
        if not self.blocks:
            message = (
                f"{amount} in {self.rows:,} rows are less than one block of cutoff_len {self.cutoff_len}: "
                "packing drops the tail, which is everything"
            )
            return [Problem("error", "short_corpus", message, self._works())]
        used = self.blocks * self.cutoff_len
        if self.exact and share(self.tokens - used, self.tokens) > 0.1:
            message = (
                f"packing makes {self.blocks:,} blocks of {self.cutoff_len} tokens and drops the tails of "
                f"its batches, {percent(self.tokens - used, self.tokens)} of {amount}"
            )
            return [
                Problem(
                    "warning", "short_corpus", message, "a smaller cutoff_len or `packing: false` keeps more"
                )
            ]
        return []

    def _works(self) -> str:
        """Name a `cutoff_len` that gives a block; a token is hardly ever longer than eight bytes."""
        sure = self.largest if self.exact else self.largest // 8
        if sure < 2:
            return "add texts"
        verb = "works" if self.exact else "should work"
        length = 1 << (sure.bit_length() - 1)
        return f"`cutoff_len: {length}` {verb}, and `packing: false` does; better, add texts"


def most_tokens(text: str) -> int:
    """Return how many tokens a text can have at most: one per byte, one at either end."""
    return len(text.encode("utf-8", "surrogatepass")) + 2
