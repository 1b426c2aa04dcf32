"""What batches of one size need at most, by how many layers are kept; how many layers fit into a budget.

*Kept* is a layer that saves its activations in forward and is not recomputed in backward. Layers are kept
from the end of the model on, because backward comes to those first and frees them first.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

# Two batches of one shape do not need the same to the byte: how many positions are supervised, how many
# images share the patches. This share of the budget is left to that.
RESERVE = 0.02
GIB = 1 << 30

Size = Mapping[str, tuple[int, ...]]


def size_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a model is called with, by name; of several, what they hold."""
    found: dict[str, tuple[int, ...]] = {}
    for name, value in {**{str(place): arg for place, arg in enumerate(args)}, **kwargs}.items():
        if isinstance(value, torch.Tensor):
            found[name] = tuple(value.shape)
        elif isinstance(value, (list, tuple)):
            found[name] = (sum(_elements(value)),)
    return found


def _elements(values: Iterable[Any]) -> Iterable[int]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _elements(value)
        else:
            yield value.numel() if isinstance(value, torch.Tensor) else 1


def covers(one: Size, other: Size) -> bool:
    """True where no tensor of the other batch is larger than that of the one, in any dimension."""
    return all(
        name in one and len(one[name]) == len(shape) and all(map(operator.ge, one[name], shape))
        for name, shape in other.items()
    )


class Batch:
    """The bounds of a batch of one size that was measured with every layer recomputed.

    A kept layer adds at no moment more than it saves, and takes the place of its recomputation: with one
    layer more, the peak grows by no more than what the layer's recomputation left allocated.

    Attributes:
        size: shapes of the model's inputs.
        needs: by the number of kept layers, an upper bound of the bytes that forward and backward allocate on
            top of what is there before.
    """

    def __init__(self, size: Size, need: int, layer_bytes: Sequence[int]) -> None:
        self.size = size
        self._saved = list(accumulate(layer_bytes, initial=0))  # by the number of kept layers
        self.needs = [need + saved for saved in self._saved]
        self._measured: set[int] = set()

    def learn(self, size: Size, kept: int, need: int) -> None:
        """Take in what a batch that this one covers really needed.

        More than the bound raises all bounds. Less lowers them, where the batch was of this very size and
        for each number of kept layers once: another of that size may need a little more.
        """
        difference = need - self.needs[kept]
        if difference > 0:
            self.needs = [bound + difference for bound in self.needs]
        elif size == self.size and kept not in self._measured:
            more = [max(saved - self._saved[kept], 0) for saved in self._saved]
            self.needs = [min(bound, need + bytes_) for bound, bytes_ in zip(self.needs, more, strict=True)]
        if size == self.size:
            self._measured.add(kept)

    def fit(self, room: int) -> int:
        """Return how many layers can be kept in this many bytes; 0 also where none can."""
        return max((kept for kept, need in enumerate(self.needs) if need <= room), default=0)


def budget_bytes(setting: float, available: int) -> int:
    """Return the budget in bytes: of a share of what is available, or as it was given."""
    return int(setting * available) if setting <= 1 else int(setting)


def gib(size: float) -> str:
    """Return bytes as text in GiB, in MiB where that is less than one."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"
