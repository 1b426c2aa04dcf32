"""Counts the bytes that a step holds, by what they are for, while tensors without storage go through it."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llamafactory_ascend.memory.fakes import compute

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer states"
INPUTS = "inputs"
ACTIVATIONS = "saved activations"
LAYER = "one layer at work"
LOSS = "logits and loss"
SHARDING = "unsharded layers"
COLLECTIVES = "collectives' buffers"
ROUNDING = "allocator rounding"  # not part of what is requested
Bytes = Counter[str]


def block_size(size: int) -> int:
    """Return what torch_npu's caching allocator takes for a block: 32 bytes more, rounded up to 512."""
    return -(-(size + 32) // 512) * 512 if size else 0


def requested(held: Bytes) -> int:
    """Return the bytes that were asked for, without the allocator's rounding."""
    return sum(held.values()) - held[ROUNDING]


@dataclass
class Peaks:
    """The most that was held in each phase, relative to what was held at the beginning.

    Attributes:
        start: what was held then.
        found: phase -> what was held more, by kind; less is negative.
    """

    start: Bytes
    found: dict[str, Bytes] = field(default_factory=dict)

    def see(self, phase: str, held: Bytes, total: int) -> None:
        known = self.found.get(phase)
        if known is None or total - requested(self.start) > requested(known):
            self.found[phase] = difference(held, self.start)


def difference(held: Bytes, start: Bytes) -> Bytes:
    found = Counter(held)
    found.subtract(start)
    return found


class Hold:
    """Bytes that are held until they are released, or this object is gone."""

    def __init__(self, ledger: "Ledger", what: Bytes) -> None:
        self._ledger, self._what = ledger, what
        ledger.add(what)

    def release(self) -> None:
        what, self._what = self._what, Counter()
        self._ledger.add(what, -1)

    __del__ = release


class Ledger(TorchDispatchMode):
    """Charges every storage once, from the operator that made it until nobody holds it.

    Attributes:
        held: bytes by kind.
        phase: of the step, what peaks are kept by.
        label: the kind of what is allocated now.
        peaks: of the whole step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: Bytes = Counter()
        self.total = 0
        self.phase, self.label = "load", WEIGHTS
        self.peaks = Peaks(Counter())
        self._watches = [self.peaks]
        self._storages: dict[int, tuple[Any, str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = compute(func, args, kwargs or {})
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.charge(leaf)
        return output

    def charge(self, tensor: Tensor, label: str = "") -> None:
        """Charge a tensor's storage unless that has been done."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        reference = weakref.ref(storage, lambda _: self._free(key))
        size, label = storage.nbytes(), label or self.label
        self._storages[key] = (reference, label, size)
        self.add(block(label, size))

    def ignore(self, tensor: Tensor) -> None:
        """Charge nothing for a tensor that is there for its shape alone."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        reference = weakref.ref(storage, lambda _: self._free(key))
        self._storages[key] = (reference, self.label, 0)

    def relabel(self, tensor: Tensor, label: str) -> None:
        """Say of a tensor that is charged what it turned out to be for."""
        key = tensor.untyped_storage()._cdata
        reference, old, size = self._storages[key]
        self._storages[key] = (reference, label, size)
        self.held[old] -= size
        self.held[label] += size

    def _free(self, key: int) -> None:
        _, label, size = self._storages.pop(key)
        self.add(block(label, size), -1)

    def add(self, what: Bytes, sign: int = 1) -> None:
        """Hold more (or less), and look whether that is a peak."""
        for kind, size in what.items():
            self.held[kind] += sign * size
        self.total += sign * requested(what)
        if sign > 0:
            for watch in self._watches:
                watch.see(self.phase, self.held, self.total)

    def spike(self, what: Bytes) -> None:
        """Hold more for a moment."""
        self.add(what)
        self.add(what, -1)

    @contextmanager
    def during(self, phase: str = "", label: str = "") -> Iterator[None]:
        """Charge what is allocated meanwhile to a phase, or to a kind."""
        saved = self.phase, self.label
        self.phase, self.label = phase or self.phase, label or self.label
        for watch in self._watches if phase else ():
            watch.see(self.phase, self.held, self.total)
        try:
            yield
        finally:
            self.phase, self.label = saved

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave the peaks of the step out of what is done meanwhile."""
        saved, self._watches = self._watches, []
        try:
            yield
        finally:
            self._watches = saved

    @contextmanager
    def watch(self) -> Iterator[Peaks]:
        """Keep the peaks of what is done meanwhile, relative to what is held now."""
        found = Peaks(Counter(self.held))
        self._watches.append(found)
        try:
            yield found
        finally:
            self._watches.remove(found)


def block(label: str, size: int) -> Bytes:
    """Return the bytes of one block of the allocator."""
    return Counter({label: size, ROUNDING: block_size(size) - size})


def blocks(label: str, sizes: Any) -> Bytes:
    """Return the bytes of several blocks of the allocator."""
    found: Bytes = Counter()
    for size in sizes:
        found.update(block(label, size))
    return found
