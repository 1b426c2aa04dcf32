"""Exact or series: the two conventions of PEFT, whose rotations are each other's transposes."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import PeftModel

    from llamafactory_ascend.run import Run

CONFIG = "adapter_config.json"


def decide(run: "Run", peft_model: "PeftModel", resumed: Path | None, new: bool) -> None:
    """Give the active adapters the convention that their weights were or will be trained with.

    The weights of a new adapter are zero, R = I in both. One that was loaded says in its configuration what
    it is. A checkpoint to resume from is loaded later, without its configuration.

    Args:
        resumed: the checkpoint.
        new: nothing was loaded into the active adapter.
    """
    from llamafactory_ascend.features.oft import EXACT, SERIES, SUBJECT

    saved = _convention_of(resumed) if resumed else None
    for name in peft_model.active_adapters:
        if saved is not None:
            _set(peft_model, name, series=saved)
        elif new:
            _set(peft_model, name, series=False)
    if any(peft_model.peft_config[name].use_cayley_neumann for name in peft_model.active_adapters):
        source = resumed if saved is not None else "the adapter"
        run.decide(SUBJECT, SERIES, f"{source} was trained with it")
        run.find(
            "warning",
            "oft",
            f"{source} was trained with PEFT's series, and goes on with it; its rotations are not exact",
        )
    elif saved is not None or not new:
        run.decide(SUBJECT, EXACT, "the adapter was trained with it")


def _convention_of(folder: Path) -> bool | None:
    """Return whether a saved adapter uses the series, None where there is no configuration."""
    from peft import OFTConfig

    if not (folder / CONFIG).is_file():
        return None
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return bool(config.get("use_cayley_neumann", OFTConfig.use_cayley_neumann))


def _set(peft_model: "PeftModel", adapter: str, series: bool) -> None:
    from peft.tuners.oft.layer import OFTLayer

    peft_model.peft_config[adapter].use_cayley_neumann = series
    for module in peft_model.modules():
        if isinstance(module, OFTLayer) and adapter in module.oft_R:
            module.oft_R[adapter].use_cayley_neumann = series


def left_to_peft(peft_model: "PeftModel") -> dict[str, int]:
    """Return why layers with exact rotations still run PEFT's own code, with their number."""
    from peft.tuners.oft.layer import OFTLayer

    from llamafactory_ascend.features.oft.layer import is_linear

    counts: Counter[str] = Counter()
    for module in peft_model.modules():
        if isinstance(module, OFTLayer) and (reason := _reason(module, is_linear(module))):
            counts[reason] += 1
    return dict(counts)


def _reason(layer: Any, linear: bool) -> str:
    if not linear:
        return f"their base layers are {type(layer.get_base_layer()).__name__}"
    rotations = [layer.oft_R[name] for name in layer.active_adapters if name in layer.oft_R]
    if any(rotation.block_share for rotation in rotations):
        return "`block_share`"
    return "`coft`" if any(rotation.coft for rotation in rotations) else ""
