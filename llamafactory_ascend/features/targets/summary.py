"""The adapted modules as the report's section `targets` and as a table in the log."""

from collections.abc import Mapping, Sequence
from typing import Any

from llamafactory_ascend.features.targets.adapted import Adapted, count_components
from llamafactory_ascend.features.targets.request import COMPONENTS


def section(origin: str, matched: Mapping[str, Sequence[str]], adapted: Adapted) -> dict[str, Any]:
    """Return the section of the run report.

    Args:
        origin: what chose the modules: `ascend.targets`, `lora_target`, an adapter.
        matched: pattern -> adapted modules.

    Returns:
        ``from``; ``matched``, pattern -> component -> modules; ``modules``, component -> modules, each
        counted once; ``trainable``, component -> parameters; ``parameters`` of all; ``percent``.
    """
    return {
        "from": origin,
        "matched": {pattern: count_components(paths) for pattern, paths in matched.items()},
        "modules": adapted.per_component(),
        "trainable": {name: adapted.trainable[name] for name in COMPONENTS if name in adapted.trainable},
        "parameters": adapted.parameters,
        "percent": round(100 * sum(adapted.trainable.values()) / max(adapted.parameters, 1), 4),
    }


def table(found: Mapping[str, Any]) -> str:
    """Return the section as lines: a pattern and its modules in each component, then the parameters."""
    shown = [name for name in COMPONENTS if found["modules"].get(name) or found["trainable"].get(name)]
    rows = [["modules", *shown]]
    for pattern, counts in found["matched"].items():
        rows.append([pattern, *(str(counts.get(name, 0)) for name in shown)])
    if len(rows) != 2:  # a single pattern is the total
        rows.append(["adapted", *(str(found["modules"].get(name, 0)) for name in shown)])
    rows.append(["trainable parameters", *(f"{found['trainable'].get(name, 0):,}" for name in shown)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(shown) + 1)]
    lines = [
        "  " + "  ".join(cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    total = sum(found["trainable"].values())
    share = f"  trainable: {total:,} of {found['parameters']:,} ({found['percent']:.4g} %)"
    return "\n".join([f"targets, from {found['from']}:", *lines, share])
