"""Launch grids: Ascend's Triton refuses a grid of more than 65,535 programs, so long inputs are split."""

import itertools

LARGEST_GRID = 65_535
CHUNK = 64  # tokens that one program of the gated delta rule works on
NARROWEST_TILE = 32  # value channels that one program works on, at least


def split_heads(
    batch: int, tokens: int, heads: int, group: int, width: int, limit: int = LARGEST_GRID
) -> list[tuple[int, int]]:
    """Cut value heads into ranges, each with a grid within the limit.

    The largest grid of the rule has a program for each row, chunk, head and tile of the value.

    Args:
        batch: rows.
        tokens: tokens of a row, padding included.
        heads: value heads.
        group: value heads that share a key head; ranges are whole groups.
        width: channels of a value head.
        limit: programs of a grid.

    Returns:
        (first, past the last) value head of each range, in order, of nearly equal size.

    Raises:
        ValueError: not even one group fits.
    """
    per_head = batch * -(-tokens // CHUNK) * -(-width // NARROWEST_TILE)
    groups = heads // group
    fitting = limit // (per_head * group)
    if fitting < 1:
        raise ValueError(
            f"{batch} rows of {tokens} tokens need a grid of {per_head * group} programs for {group} heads, "
            f"the limit is {limit}: use fewer rows or a smaller cutoff_len"
        )
    parts = -(-groups // fitting)
    bounds = [groups * part // parts * group for part in range(parts + 1)]
    return list(itertools.pairwise(bounds))
