"""Launch grids: within the limit, whole groups, every head once, as few launches as possible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamafactory_ascend.kernels.grids import CHUNK, LARGEST_GRID, NARROWEST_TILE, split_heads


def programs(batch: int, tokens: int, heads: int, width: int) -> int:
    return batch * -(-tokens // CHUNK) * heads * -(-width // NARROWEST_TILE)


def test_a_short_sequence_is_one_launch() -> None:
    """Qwen3.5 27B: 48 value heads of 128, three to a key head."""
    assert split_heads(1, 4096, 48, 3, 128) == [(0, 48)]


def test_a_long_sequence() -> None:
    """128k tokens would need 2048 * 48 * 4 = 393,216 programs: seven launches."""
    ranges = split_heads(1, 131_072, 48, 3, 128)
    assert ranges[0][0] == 0 and ranges[-1][1] == 48
    assert len(ranges) == 8
    assert max(programs(1, 131_072, last - first, 128) for first, last in ranges) <= LARGEST_GRID


def test_too_long_for_one_group() -> None:
    with pytest.raises(ValueError, match="use fewer rows or a smaller cutoff_len"):
        split_heads(4, 1_000_000, 48, 3, 128)


@given(
    batch=st.integers(1, 8),
    tokens=st.integers(1, 20_000),
    groups=st.integers(1, 32),
    group=st.integers(1, 4),
    width=st.sampled_from([16, 64, 128, 256]),
)
def test_ranges(batch: int, tokens: int, groups: int, group: int, width: int) -> None:
    heads = groups * group
    if programs(batch, tokens, group, width) > LARGEST_GRID:
        with pytest.raises(ValueError):
            split_heads(batch, tokens, heads, group, width)
        return
    ranges = split_heads(batch, tokens, heads, group, width)
    assert [head for first, last in ranges for head in range(first, last)] == list(range(heads))
    assert all(
        first % group == 0 and programs(batch, tokens, last - first, width) <= LARGEST_GRID
        for first, last in ranges
    )
    if len(ranges) > 1:  # one launch fewer would not do
        fitting = LARGEST_GRID // programs(batch, tokens, group, width)
        assert (len(ranges) - 1) * fitting < groups
