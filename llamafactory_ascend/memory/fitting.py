"""What fits on a card: the longest rows, the most rows, the fewest cards."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from llamafactory_ascend.memory.ledger import Bytes
from llamafactory_ascend.memory.repeats import Costs
from llamafactory_ascend.memory.step import Batch, Plan, measure

MOST_ROWS, LONGEST, MOST_CARDS = 512, 1 << 18, 1024
CLOSE = 0.03  # a search ends where the next size that was tried is but so much larger
TRIES = 8


@dataclass(frozen=True)
class Fit:
    """What fits; 0: not even the least.

    Attributes:
        tokens: the longest rows, with the rows of the plan.
        rows: the most rows of a micro-batch, of the plan's length.
        cards: the fewest cards; None: no number of them, as they share nothing out that is too large.
    """

    tokens: int
    rows: int
    cards: int | None


def peak(phases: dict[str, Bytes]) -> tuple[str, int]:
    """Return the phase that needs most, and its bytes, the allocator's rounding included."""
    return max(((phase, sum(held.values())) for phase, held in phases.items()), key=lambda pair: pair[1])


def what_fits(
    model: nn.Module, plan: Plan, budget: int, batch_of: Callable[[int, int], Batch], tokens: int, rows: int
) -> Fit:
    """Return what of a plan's sizes would fit on a card, the others left as they are.

    Args:
        model: on the meta device, as it is trained; it is left as it was.
        plan: how it is trained; an evaluation in it is not looked at.
        budget: bytes of a card.
        batch_of: (rows, tokens of a row) -> what the data collator returns for them.
        tokens: length of the rows of the plan's batch.
        rows: of the plan's batch.
    """
    plan = replace(plan, eval_batch=None, switches=())
    costs: Costs = {}

    def size(rows: int, tokens: int, cards: int = plan.cards) -> int:
        changed = replace(plan, batch=batch_of(rows, tokens), cards=cards)
        return peak(measure(model, changed, costs))[1]

    least = 8  # the host pads rows to multiples of it
    positions = longest_row(model) // least
    longest = largest(lambda n: size(rows, n * least), budget, max(1, tokens // least), positions) * least
    most = largest(lambda n: size(n, tokens), budget, rows, MOST_ROWS)
    return Fit(longest, most, fewest_cards(lambda n: size(rows, tokens, n), budget, plan.policy is not None))


def longest_row(model: nn.Module) -> int:
    """Return the most tokens of a row that are looked at: the positions that a model knows."""
    config: Any = model.config
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST)


def largest(size: Callable[[int], int], budget: int, first: int, limit: int) -> int:
    """Return about the largest number from 1 to `limit` whose size is within the budget, 0 if there is none.

    Sizes grow with the number. The search follows the line through what is known, so that few sizes are
    enough where they grow evenly, and parts the rest in turn, so that few are enough where they do not.
    """
    known: dict[int, int] = {}
    number = min(first, limit)
    for attempt in range(TRIES):
        known[number] = size(number)
        low = max((n for n, bytes_ in known.items() if bytes_ <= budget), default=0)
        high = min((n for n, bytes_ in known.items() if bytes_ > budget), default=limit + 1)
        if high - low <= max(1, int(low * CLOSE)):
            break
        middle = attempt % 2 and low and high <= limit
        guess = int((low * high) ** 0.5) if middle else _on_the_line(known, budget, low, high, limit)
        number = min(max(guess, low + 1), high - 1)
    return max((n for n, bytes_ in known.items() if bytes_ <= budget), default=0)


def _on_the_line(known: dict[int, int], budget: int, low: int, high: int, limit: int) -> int:
    """Return where the line through the two sizes next to the budget meets it."""
    if len(known) == 1:
        return low * 2 or high // 2
    a, b = (low, high) if low and high in known else sorted(known)[:2] if not low else sorted(known)[-2:]
    slope = (known[b] - known[a]) / (b - a)
    return min(limit, int(a + (budget - known[a]) / slope)) if slope > 0 else limit


def fewest_cards(size: Callable[[int], int], budget: int, shared: bool) -> int | None:
    """Return the fewest cards, a power of two, with which each is within the budget.

    Args:
        shared: weights are shared out; otherwise every card holds all of them.
    """
    cards = 1 if not shared else 2
    while cards <= MOST_CARDS:
        if size(cards) <= budget:
            return cards
        if not shared:
            return None
        cards *= 2
    return None
