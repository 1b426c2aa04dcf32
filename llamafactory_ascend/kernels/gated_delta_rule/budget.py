"""How many heads to work on at once, from a memory budget. Pure arithmetic, no tensor."""

GIB = 1024**3
# Holds 48 heads of 128 at 4096 tokens (a Qwen3.5-27B layer) in one block; longer sequences are walked in
# blocks, each of which is then large enough for launch costs not to matter.
DEFAULT_BUDGET = 3 * GIB // 2


def working_bytes_per_head(chunks: int, chunk_size: int, key_dim: int, value_dim: int, itemsize: int) -> int:
    """Return the bytes that one value head holds at the peak of its backward pass, saved tensors included.

    The peak is either in the scan of `backward.py` or in the products right after it; the counts below are
    those of the tensors alive there.

    Args:
        chunks: chunks of all sequences of the batch together.
        chunk_size: tokens in a chunk.
        key_dim: width of a query and key head.
        value_dim: width of a value head.
        itemsize: bytes of one number of the compute dtype (4 for float32).
    """
    states = 2 * key_dim * value_dim  # states and their gradients
    scan = key_dim * key_dim + chunk_size * (4 * key_dim + value_dim) + 3 * chunk_size**2
    products = chunk_size * (4 * key_dim + 2 * value_dim) + 4 * chunk_size**2
    return itemsize * chunks * (states + max(scan, products))


def choose_head_block(value_heads: int, group: int, bytes_per_head: int, budget: int = DEFAULT_BUDGET) -> int:
    """Return how many value heads to work on at once.

    Args:
        value_heads: value heads of the layer.
        group: value heads that share one key head; a block never splits a group.
        bytes_per_head: from `working_bytes_per_head`.
        budget: bytes that one block may hold. A single group is taken even when it needs more.

    Returns:
        A multiple of `group`, at most `value_heads`, such that the blocks are as few as the budget allows and
        as equal as possible (48 heads with room for 40 are two blocks of 24, not 40 and 8).
    """
    groups = value_heads // group
    fitting = min(groups, max(1, budget // (bytes_per_head * group)))
    blocks = -(-groups // fitting)
    return -(-groups // blocks) * group
