"""Searching the largest size within a budget."""

from collections.abc import Callable

import pytest

from llamafactory_ascend.memory.fitting import TRIES, fewest_cards, largest


@pytest.mark.parametrize(
    ("size", "best"),
    [
        (lambda n: 100 + 7 * n, 128),  # 996 of 1,000
        (lambda n: 100 + n * n // 10, 94),
        (lambda n: 2000, 0),
        (lambda n: 1 + n // 10**6, 4096),  # all of them fit
    ],
)
def test_the_largest_is_found_within_three_percent(size: Callable[[int], int], best: int) -> None:
    asked: list[int] = []

    def ask(number: int) -> int:
        asked.append(number)
        return size(number)

    found = largest(ask, 1000, first=8, limit=4096)
    assert len(asked) <= TRIES and len(set(asked)) == len(asked)
    assert best * 0.97 - 1 <= found <= best


def test_fewest_cards_are_a_power_of_two_or_none() -> None:
    assert fewest_cards(lambda n: 100 + 800 // n, budget=210, shared=True) == 8
    assert fewest_cards(lambda n: 300 + 800 // n, budget=210, shared=True) is None
    assert fewest_cards(lambda n: 100, budget=210, shared=False) == 1
    assert fewest_cards(lambda n: 300, budget=210, shared=False) is None
