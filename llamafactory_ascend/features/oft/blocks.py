"""Block sizes: PEFT silently takes the nearest divisor of each layer's width, down to blocks of size 1."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.layers import component_of, plain_name

if TYPE_CHECKING:
    from peft import PeftModel

    from llamafactory_ascend.run import Run

# torch's batched LU on a CPU, which PEFT's exact option is made of, calls a threaded LAPACK from threads.
SAFE_SOLVE = 150
SOLVE_BUG = "https://github.com/pytorch/pytorch/issues/142815"
EXAMPLES = 5


@dataclass(frozen=True)
class Block:
    """The blocks of one adapted module: its plain path, its input width, and the size PEFT settled on."""

    name: str
    width: int
    size: int

    @property
    def kind(self) -> str:
        """Return where it belongs and what it is called, e.g. ``vision qkv``."""
        return f"{component_of(self.name)} {self.name.rpartition('.')[2]}"


def sizes(peft_model: "PeftModel") -> list[Block]:
    """Return the blocks of the active adapters of an OFT model."""
    from peft.tuners.oft.layer import OFTLayer

    return [
        Block(plain_name(name), layer.in_features, layer.oft_R[adapter].block_size)
        for name, layer in peft_model.named_modules()
        if isinstance(layer, OFTLayer)
        for adapter in layer.active_adapters
        if adapter in layer.oft_R
    ]


def table(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Return a row for each kind of layer: `layers`, `width`, `block_size`, `count`."""
    counts = Counter((block.kind, block.width, block.size) for block in blocks)
    return [
        {"layers": kind, "width": width, "block_size": size, "count": count}
        for (kind, width, size), count in counts.items()
    ]


def describe(blocks: Sequence[Block]) -> str:
    """Return a sentence of the most common size, and the kinds of layers that have another."""
    if not blocks:
        return "no OFT layer"
    common, _ = Counter(block.size for block in blocks).most_common(1)[0]
    others = [
        f"{row['block_size']} in {row['count']} x {row['layers']} (width {row['width']})"
        for row in table(blocks)
        if row["block_size"] != common
    ]
    return "; ".join([f"block size {common} in {sum(b.size == common for b in blocks)} layers", *others])


def refuse_single(blocks: Sequence[Block], by_targets: bool = False) -> None:
    """Stop where a layer has blocks of size 1: nothing turns in one dimension, so OFT does nothing there.

    Args:
        by_targets: the modules were chosen by ``ascend.targets`` and not by name.

    Raises:
        AscendError: there is one; with the modules and what to type.
    """
    bad = [block for block in blocks if block.size == 1]
    if not bad:
        return
    names = ", ".join(block.name for block in bad[:EXAMPLES])
    more = f" and {len(bad) - EXAMPLES} more" if len(bad) > EXAMPLES else ""
    widths = ", ".join(str(width) for width in sorted({block.width for block in bad}))
    leaves = {block.name.rpartition(".")[2] for block in bad}
    rest = sorted({block.name.rpartition(".")[2] for block in blocks} - leaves)
    fitting = ", ".join(map(str, divisors(min(block.width for block in bad))))
    named = "take them out of `ascend.targets`" if by_targets else f"`oft_target: {','.join(rest)}`"
    raise AscendError(
        f"OFT would do nothing in {len(bad)} of {len(blocks)} layers: the block size that PEFT takes for "
        f"width {widths} is 1 ({names}{more})",
        (f"{named}, or " if by_targets or rest else "")
        + f"an `oft_block_size` that divides the width (without `oft_rank`): {fitting}",
    )


def divisors(width: int) -> list[int]:
    """Return the block sizes above 1 that a width allows."""
    return [size for size in range(2, width + 1) if width % size == 0]


def warn(run: "Run", blocks: Sequence[Block]) -> None:
    """Say where others will merge the adapter wrongly."""
    largest = max((block.size for block in blocks), default=0)
    if largest > SAFE_SOLVE:
        run.find(
            "warning",
            "oft",
            f"blocks of {largest}: on a CPU with more than one thread torch solves batches of systems wider "
            f"than {SAFE_SOLVE} wrongly: merge this adapter where this plugin is, or with OMP_NUM_THREADS=1 "
            f"({SOLVE_BUG})",
        )
