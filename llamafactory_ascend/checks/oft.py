"""OFT adapters on disk: what adapter_config.json must say, which blocks fit a layer, how orthogonal R is."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SERIES_CHANGED = (0, 18)  # PEFT 0.18.0: OFTConfig.check_kwargs
ELEMENTS_AT_ONCE = 2**24  # of the rotations that are computed together: 64 MiB in float32


def config_problems(config: Mapping[str, Any], installed: str = "", any_version: bool = False) -> list[str]:
    """Say why an OFT adapter's weights would not mean what they meant when they were trained.

    PEFT only warns, or takes its defaults, and then computes other rotations from the same weights.

    Args:
        config: adapter_config.json.
        installed: version of PEFT that is going to load it, "" where nobody is.
        any_version: the user answers for everything that PEFT itself can load.

    Returns:
        Sentences that end with what to do; none for an adapter of another kind.
    """
    if config.get("peft_type") != "OFT":
        return []
    if "oft_block_size" not in config:
        return [
            "adapter_config.json has no oft_block_size, so it is of a PEFT below 0.14, whose OFT weights no "
            "later one reads: train it again, or merge it with PEFT 0.13; or write the key if it was lost"
        ]
    if any_version:
        return []
    if "use_cayley_neumann" not in config:
        return [
            "adapter_config.json does not say use_cayley_neumann: PEFT would take its series, but versions "
            'that did not know the key rotated exactly. Write `"use_cayley_neumann": false` into it, or true'
        ]
    found = _version(config.get("peft_version"))
    if config["use_cayley_neumann"] and (found is None or found < SERIES_CHANGED):
        named = (
            f"is of PEFT {config['peft_version']}" if found else "names no peft_version, so it is of a PEFT"
        )
        return [
            f"adapter_config.json {named} below 0.18, which changed the Cayley-Neumann series: the same "
            "weights rotate by other angles now. Train it again, or merge it with the PEFT that made it; "
            "`ascend.oft.any_version: true` loads it all the same"
        ]
    now = _version(installed)
    if found and now and found > now:
        return [
            f"adapter_config.json is of PEFT {config['peft_version']}, but {installed} is installed, which "
            "may rotate otherwise. Install the newer one, or write `ascend.oft.any_version: true`"
        ]
    return []


def _version(text: Any) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", str(text))
    return (int(match[1]), int(match[2])) if match else None


def block_size(columns: int) -> int | None:
    """Return n where an n x n skew-symmetric block has this number of free entries, n(n-1)/2."""
    n = round((1 + (1 + 8 * columns) ** 0.5) / 2)
    return n if n * (n - 1) // 2 == columns else None


def fitting(width: int, wanted: int) -> int:
    """Return the divisor of ``width`` that PEFT takes for ``wanted``: the nearest one, the smaller of two."""
    if wanted >= width:
        return width
    lower = next(n for n in range(wanted, 0, -1) if width % n == 0)
    higher = next(n for n in range(wanted, width + 1) if width % n == 0)
    return lower if wanted - lower <= higher - wanted else higher


def block_faults(shape: tuple[int, ...], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the shape (blocks, free entries) of an ``oft_R`` of some layer."""
    if len(shape) > 2:
        yield f"oft_R has shape {list(shape)}, it must be a matrix"
    if len(shape) != 2 or shape[0] == 0:
        return
    block = block_size(shape[1])
    if block is None:
        yield f"oft_R has {shape[1]} columns, which is no block's n(n-1)/2"
    elif block == 1:
        yield "oft_R has blocks of 1 x 1, which rotate nothing: no divisor of the width is near the size"
    elif config.get("block_share"):
        if shape[0] != 1:
            yield f"oft_R has {shape[0]} blocks, adapter_config.json shares one (block_share)"
    else:
        yield from _other_blocks(shape[0], block, config)


def _other_blocks(blocks: int, block: int, config: Mapping[str, Any]) -> Iterator[str]:
    width, wanted, count = blocks * block, config.get("oft_block_size") or 0, config.get("r") or 0
    if wanted and (fits := fitting(width, wanted)) != block:
        yield f"oft_R has blocks of {block}, oft_block_size {wanted} gives {fits} for {width} inputs"
    if not wanted and count and (fits := fitting(width, count)) != blocks:
        yield f"oft_R has {blocks} blocks, r {count} gives {fits} for {width} inputs"


def orthogonality_error(weight: "Tensor", config: Mapping[str, Any]) -> float:
    """Return the largest ``||R R' - I|| / ||I||`` of the blocks of one ``oft_R``, in Frobenius norms.

    NaN where a rotation cannot be told: of weights that are no numbers, or beyond what `cayley` provides for.

    Args:
        weight: (blocks, n(n-1)/2), as the file holds it.
        config: adapter_config.json; ``use_cayley_neumann`` and ``num_cayley_neumann_terms`` say how.
    """
    import torch

    from llamafactory_ascend.features.oft import cayley

    n = block_size(weight.shape[1]) or 1
    errors = []
    for part in torch.split(weight.float(), max(1, ELEMENTS_AT_ONCE // (n * n))):
        if config.get("use_cayley_neumann", True):
            rotation = cayley.series(part, int(config.get("num_cayley_neumann_terms", 5)))
        else:
            rotation = cayley.cayley(part)
            rotation[cayley.too_wide(part)] = torch.nan
        errors.append(cayley.orthogonality_error(rotation))
    return float(torch.cat(errors).max())  # torch's max is NaN where one of them is, Python's may not be
