"""How many optimizer steps rows come to, as Transformers' Trainer counts them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llamafactory_ascend.errors import AscendError

DEFAULTS: dict[str, Any] = {  # of Transformers' TrainingArguments
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "dataloader_drop_last": False,
}


@dataclass(frozen=True)
class Steps:
    """Steps of a training on `samples` rows or packed sequences."""

    samples: int
    ranks: int
    batch: int
    accumulation: int
    per_epoch: int
    total: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def left_to_train(samples: int, val_size: float) -> int:
    """Return what `val_size` (rows, or a part below 1) leaves of the samples."""
    taken = int(val_size) if val_size > 1 else math.ceil(val_size * samples)
    return max(samples - taken, 0)


def steps(samples: int, recipe: Mapping[str, Any], ranks: int) -> Steps:
    """Return the steps of a recipe; a batch that is not full, and a last accumulation, count as one.

    Raises:
        AscendError: a batch or an accumulation that is no number above zero.
    """
    given = {name: recipe.get(name, default) for name, default in DEFAULTS.items()}
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if not isinstance(given[name], int) or given[name] < 1:
            raise AscendError(f"`{name}` is {given[name]!r}, it must be a whole number above 0")
    batch, accumulation = given["per_device_train_batch_size"], given["gradient_accumulation_steps"]
    if given["dataloader_drop_last"]:
        batches = samples // batch // ranks
    else:
        batches = math.ceil(math.ceil(samples / batch) / ranks)
    per_epoch = max(math.ceil(batches / accumulation), 1) if samples else 0
    total = int(given["max_steps"])
    if total <= 0:
        total = math.ceil(float(given["num_train_epochs"]) * per_epoch)
    return Steps(samples, ranks, batch, accumulation, per_epoch, total)
