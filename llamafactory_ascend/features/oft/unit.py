"""Units: the layers whose OFT weights are whole at the same time; their rotations are computed together."""

import functools
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from llamafactory_ascend.features.oft.layer import active_rotations, compute_dtype, is_exact
from llamafactory_ascend.features.oft.rotations import CayleyRotations, Rotations

Group = tuple[Any, ...]  # block size, device, dtype of the OFT weights, dtype of the base layers


class Clock:
    """Counts what changes weights without a trace in their version counters.

    FSDP2 refills its unsharded parameters, and DeepSpeed's optimizers write through ``.data``, both past the
    counter. Every optimizer's step and every loaded state dict counts.
    """

    def __init__(self) -> None:
        self.time = 0

    def tick(self, *_: Any) -> None:
        self.time += 1


@functools.cache
def clock() -> Clock:
    """Return the clock of this process, which from now on hears of every optimizer step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    found = Clock()
    register_optimizer_step_post_hook(found.tick)
    return found


def state_of(weight: Tensor) -> tuple[Any, ...]:
    """Return what is another when a weight may hold other values."""
    return (id(weight), weight._version, weight.dtype, weight.device, clock().time)


class Unit:
    """Rotations of some layers, in groups of one block size.

    Attributes:
        layers: PEFT's OFT layers.
        computed: how often the rotations of a group have been computed from its weights.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.computed = 0
        self._forget()

    def _forget(self) -> None:
        # The weights stay referenced, so that no other gets the id of one of them.
        self._kept: dict[Group, tuple[list[Any], list[Tensor], Rotations]] = {}
        # With and without autograd: an evaluation or a reference model's forward between a forward and its
        # backward must leave what recomputed layers will read.
        self._current: dict[bool, dict[int, tuple[Any, Tensor]]] = {True: {}, False: {}}

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles start without results: these belong to a graph."""
        return {"layers": self.layers, "computed": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare(self, *_: Any) -> None:
        """Make a node of the graph for each group; a forward pre-hook of the module that holds the layers."""
        groups: dict[Group, list[Any]] = defaultdict(list)
        for layer in self.layers:
            rotations = active_rotations(layer)
            if rotations and all(map(is_exact, rotations)):
                base = layer.get_base_layer().weight.dtype
                for rotation in rotations:
                    weight = rotation.weight
                    groups[rotation.block_size, weight.device, weight.dtype, base].append(rotation)
        prepared = {}
        for group, rotations in groups.items():
            _, device, _, base = group
            weights = [rotation.weight for rotation in rotations]
            dtype = compute_dtype(base, device.type)
            shared = self._rotations(group, weights)
            parts = CayleyRotations.apply(shared, dtype, *weights)  # type: ignore[no-untyped-call]
            for rotation, part in zip(rotations, parts, strict=True):
                prepared[id(rotation)] = (_seen(rotation.weight), part)
        self._current[torch.is_grad_enabled()] = prepared

    def _rotations(self, group: Group, weights: list[Tensor]) -> Rotations:
        states = [state_of(weight) for weight in weights]
        kept = self._kept.get(group)
        if kept is None or kept[0] != states:
            kept = None
            self._kept.pop(group, None)  # what is out of date goes before the new needs its memory
            self._current = {True: {}, False: {}}
            self.computed += 1
            kept = self._kept[group] = (states, weights, Rotations(weights))
        return kept[2]

    def rotation(self, rotation: Any, dtype: torch.dtype) -> Tensor:
        """Return a layer's rotations [blocks, b, b] in a dtype, part of the graph where autograd is on.

        A layer that is called by itself, outside of the module whose hook prepares, gets them too.
        """
        seen = _seen(rotation.weight)
        entry = self._current[torch.is_grad_enabled()].get(id(rotation))
        if entry is None or entry[0] != seen:
            self.prepare()
            entry = self._current[torch.is_grad_enabled()][id(rotation)]
        return entry[1].to(dtype)


def _seen(weight: Tensor) -> tuple[Any, ...]:
    return (*state_of(weight), weight.requires_grad)


def find_units(base: nn.Module, layers: list[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Return the layers by the module in whose forward they are whole: FSDP2's modules, or the model."""
    from torch.distributed.fsdp import FSDPModule

    wanted = set(map(id, layers))
    found: dict[nn.Module, list[nn.Module]] = {base: []}

    def visit(module: nn.Module, unit: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            unit = module
        if id(module) in wanted:
            found.setdefault(unit, []).append(module)
            return
        for child in module.children():
            visit(child, unit)

    visit(base, base)
    return found
