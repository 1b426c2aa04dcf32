"""What `cutoff_len` leaves, as arithmetic; tests/host/test_data.py holds it against the host's batches."""

from hypothesis import given
from hypothesis import strategies as st

from llamafactory_ascend.checks.data.lengths import Blocks, Lengths, count, keep, most_tokens


def cut(source: int, target: int, room: int) -> tuple[int, int]:
    """The host's division: the shorter side keeps all where it can."""
    if target * 2 < room:
        most = room
    elif source * 2 < room:
        most = room - source
    else:
        most = int(room * (target / (source + target)))
    target_kept = min(most, target)
    return min(max(room - target_kept, 0), source), target_kept


LENGTH = st.integers(1, 60)


@given(st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=4), st.integers(0, 1), st.booleans())
def test_needed_is_the_smallest_cutoff_len_that_cuts_nothing(
    pairs: list[tuple[int, int]], overhead: int, last_only: bool
) -> None:
    needed = count(0, pairs, overhead, 8, cut, last_only).needed
    assert keep(pairs, overhead, needed, cut, last_only) == pairs
    assert keep(pairs, overhead, needed - 1, cut, last_only) != pairs


def test_answer_loses_its_end_and_turn_vanishes() -> None:
    row = count(7, [(100, 40), (10, 20)], 0, 64, cut)
    assert [(turn.prompt_kept, turn.response_kept) for turn in row.turns] == [(46, 18), (0, 0)]
    assert (row.kept, row.lost, row.vanished) == (64, 42, (2,))
    masked = count(7, [(100, 40), (10, 20)], 0, 64, cut, last_only=True)
    assert (masked.lost, masked.vanished) == (0, ())
    lengths = Lengths(64)
    lengths.see(row)
    (problem,) = lengths.problems()
    assert problem.message == (
        "cutoff_len 64 cuts off 70 % of the tokens of all answers (42 of 60), end tokens with them: "
        "row 7: the answer loses its end; row 7: turn 2 of 2 vanishes"
    )
    assert problem.next == (
        "`cutoff_len: 170` keeps 95 % of the rows whole, `170` all; `mask_history: true` keeps the last "
        "turn, and trains on it alone"
    )


def test_cutoff_len_for_most_rows() -> None:
    lengths = Lengths(10)
    for number in range(20):
        lengths.see(count(number, [(5, 5 if number else 500)], 0, 10, cut))
    assert (lengths.enough(0.95), lengths.enough(1)) == (10, 505)


def test_blocks_drop_the_tail_of_every_batch() -> None:
    blocks = Blocks(100, exact=True, batch=2)
    for tokens in (90, 90, 90, 90):  # two batches of 180: one block each
        blocks.see(tokens)
    (problem,) = blocks.problems()
    assert problem.message == (
        "packing makes 2 blocks of 100 tokens and drops the tails of its batches, 44 % of 360 tokens"
    )
    blocks = Blocks(200, exact=True, batch=2)
    for tokens in (90, 90, 90, 90):
        blocks.see(tokens)
    (problem,) = blocks.problems()
    assert problem.level == "error"
    assert problem.next.startswith("`cutoff_len: 128` works")


def test_bound_of_tokens() -> None:
    assert most_tokens("很短") == 8
