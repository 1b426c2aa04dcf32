"""FSDP2, as torch 2.10 does it: what each card has of the weights, and what it holds of others' for a while.

The order in which buffers come and go is that of `torch.distributed.fsdp._fully_shard`: in forward the
gathered buffer of a module stays until the next module has been unsharded, in backward the buffer of the
module that comes next is gathered ahead. Every weight is cut along its first dimension, and padded to equal
shares.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.memory.ledger import (
    COLLECTIVES,
    GRADIENTS,
    SHARDING,
    WEIGHTS,
    Hold,
    Ledger,
    block,
    blocks,
)
from llamafactory_ascend.memory.sharding import Sharding


@dataclass(frozen=True)
class Policy:
    """How a model is sharded.

    Attributes:
        classes: names of the classes whose modules are sharded on their own; the rest is the root's.
        stored: dtype of a card's own share of what is trained, None: as the weights are loaded.
        frozen: the same of what is not trained.
        computed: dtype of unsharded weights and of the gradients that are reduced, None: as they are stored.
        reshard: unsharded weights are dropped after forward, and gathered again for backward.
        whole: bytes that are on each card before the weights are cut: all of them, where the model was loaded
            onto it.
    """

    classes: Collection[str]
    stored: torch.dtype | None
    frozen: torch.dtype | None
    computed: torch.dtype | None
    reshard: bool = True
    whole: int = 0


class _Group:
    """The weights that are gathered together: those of one module, without its sharded children's."""

    def __init__(self, parameters: list[nn.Parameter], cards: int, policy: Policy) -> None:
        self.parameters = parameters
        shares = [share(parameter, cards) for parameter in parameters]
        whole = [
            numbers * cards * (policy.computed or policy.stored or parameter.dtype).itemsize
            for numbers, parameter in zip(shares, parameters, strict=True)
        ]
        self.weights = blocks(SHARDING, whole)
        self.buffer = block(COLLECTIVES, sum(whole))
        self.input = block(COLLECTIVES, sum(whole) // cards)
        self.gathered: Hold | None = None
        self.unsharded: Hold | None = None
        self.calls: list[int] = []  # places in the order of forward calls, for backward
        self.reduced = False
        self.gradients: Hold | None = None


def share(tensor: Tensor, cards: int) -> int:
    """Return the numbers of a tensor that lie on each card, padding included."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return ceil(rows / cards) * (tensor.numel() // max(rows, 1))


class FullyShard(Sharding):
    """Weights, gradients and optimizer states of each module are shared out among all cards."""

    def __init__(self, model: nn.Module, ledger: Ledger, cards: int, policy: Policy) -> None:
        super().__init__(model, ledger, cards)
        self.policy = policy
        self._groups: dict[int, _Group] = {}
        seen: set[int] = set()
        for module in reversed(list(_sharded(model, policy.classes))):  # children first
            own = [x for x in module.parameters() if id(x) not in seen]
            seen.update(map(id, own))
            self._groups[id(module)] = _Group(list(dict.fromkeys(own)), cards, policy)
        self._root = _Group([x for x in model.parameters() if id(x) not in seen], cards, policy)
        self._order: list[_Group] = []
        self._last: Hold | None = None  # the buffer of the module that was unsharded last, in forward
        self._scattered: Hold | None = None  # the gradients that were reduced last
        self._own: dict[int, nn.Parameter] = {}  # of this card, what is trained

    @property
    def all_groups(self) -> list[_Group]:
        return [*self._groups.values(), self._root]

    def load(self) -> None:
        """Charge this card's shares, which were cut in the dtype of the weights, each whole for a while."""
        self._shares: list[Any] = []
        whole = Hold(self.ledger, block(WEIGHTS, self.policy.whole))
        sizes = {x: self._dtype(x).itemsize for x in self.model.parameters()}
        shares = [share(x, self.cards) * size for x, size in sizes.items()]
        largest = max(x.numel() * size for x, size in sizes.items())
        self.ledger.spike(blocks(WEIGHTS, shares) + block(COLLECTIVES, largest))
        for parameter in self.model.parameters():
            self.ledger.ignore(parameter)
            numbers, dtype = share(parameter, self.cards), self._dtype(parameter)
            if parameter.requires_grad:
                own = nn.Parameter(torch.empty(numbers, dtype=dtype))
                self._own[id(parameter)] = own
            else:
                self._shares.append(Hold(self.ledger, block(WEIGHTS, numbers * dtype.itemsize)))
        for buffer in self.model.buffers():
            self.ledger.charge(buffer)
        whole.release()

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype of a share; a parameter itself has the dtype of what is computed meanwhile."""
        kept = self.policy.stored if parameter.requires_grad else self.policy.frozen
        return kept or parameter.dtype

    def trained(self) -> list[nn.Parameter]:
        return list(self._own.values())

    def cast(self, value: Any) -> Any:
        """Return an input of the model as the root casts it."""
        dtype = self.policy.computed
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if dtype and is_float else value

    def enter_model(self) -> None:
        self._unshard(self._root, forward=True)

    def leave_model(self) -> None:
        self._reshard_after_forward(self._root)
        self._last = None

    def enter_forward(self, layer: nn.Module) -> None:
        if group := self._groups.get(id(layer)):
            self._unshard(group, forward=True)

    def leave_forward(self, layer: nn.Module) -> None:
        if group := self._groups.get(id(layer)):
            self._reshard_after_forward(group)

    def begin_backward(self) -> None:
        self._before_backward(self._root)

    def enter_backward(self, layer: nn.Module) -> None:
        if group := self._groups.get(id(layer)):
            self._before_backward(group)

    def leave_backward(self, layer: nn.Module, inputs: bool) -> bool:
        group = self._groups.get(id(layer))
        if group is not None and inputs:
            self._after_backward(group)
        return group is not None

    def end_backward(self) -> None:
        for group in self.all_groups:
            if not group.reduced:
                self._after_backward(group)
            group.gathered, group.reduced = None, False
            group.calls.clear()
        self._order.clear()
        self._scattered = None

    def give_gradients(self) -> None:
        for group in self.all_groups:
            group.gradients = None
        for own in self._own.values():
            with self.ledger.during(label=GRADIENTS):
                own.grad = torch.empty_like(own)

    def _gather(self, group: _Group) -> None:
        if group.gathered is None and group.unsharded is None and group.parameters:
            with_input = Hold(self.ledger, group.input)
            group.gathered = Hold(self.ledger, group.buffer)
            with_input.release()

    def _unshard(self, group: _Group, forward: bool) -> None:
        self._gather(group)
        if group.gathered is None:
            return
        if forward:
            self._last = None
        group.unsharded = Hold(self.ledger, group.weights)
        if forward:
            self._last = group.gathered
        group.gathered = None

    def _reshard_after_forward(self, group: _Group) -> None:
        if self.policy.reshard:
            group.unsharded = None
        if torch.is_grad_enabled():
            group.calls.append(len(self._order))
            self._order.append(group)

    def _before_backward(self, group: _Group) -> None:
        self._unshard(group, forward=False)
        place = group.calls.pop() if group.calls else 0
        if place:
            self._gather(self._order[place - 1])

    def _after_backward(self, group: _Group) -> None:
        """Drop the unsharded weights, and share out the gradients of what is trained."""
        group.reduced = True
        trained = [x for x in group.parameters if x.requires_grad]
        for parameter in trained:
            parameter.grad = None
        group.unsharded = None
        if not trained:
            return
        self._scattered = None
        numbers = sum(share(parameter, self.cards) for parameter in trained)
        reduced = (self.policy.computed or trained[0].dtype).itemsize
        self._scattered = Hold(self.ledger, block(COLLECTIVES, numbers * self.cards * reduced))
        output = Hold(self.ledger, block(COLLECTIVES, numbers * reduced))
        size = numbers * (self.policy.stored or trained[0].dtype).itemsize
        if group.gradients is None:
            group.gradients = Hold(self.ledger, block(GRADIENTS, size))
        else:
            self.ledger.spike(block(GRADIENTS, size))
        output.release()

    def save(self) -> None:
        """Gather what is trained, one tensor after the other."""
        for group in self.all_groups:
            for parameter in group.parameters:
                if parameter.requires_grad:
                    dtype = self.policy.stored or parameter.dtype
                    self.ledger.spike(block(COLLECTIVES, parameter.numel() * dtype.itemsize))


def _sharded(model: nn.Module, classes: Collection[str]) -> Iterator[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    for name, module in model.named_modules():
        if type(module).__name__ in classes:
            if not isinstance(module, GradientCheckpointingLayer):
                raise AscendError(f"{name} is sharded on its own, and is no layer that can be measured")
            yield module
