"""Layers that are alike are measured once: the others hold what the first one held.

The first layer of its kind is run apart, forward and backward, on inputs like those of the model. After that
each layer of the kind, the first included, is one node of the graph that holds and asks for as many bytes.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from llamafactory_ascend.features.oft.layer import UNIT, active_rotations, compute_dtype
from llamafactory_ascend.memory import autocast
from llamafactory_ascend.memory.ledger import (
    ACTIVATIONS,
    GRADIENTS,
    LAYER,
    Bytes,
    Hold,
    Ledger,
    block,
    difference,
)

if TYPE_CHECKING:
    from llamafactory_ascend.memory.sharding import Sharding

SMALL = 1024  # numbers of a tensor that are part of what makes two layers alike


@dataclass(frozen=True)
class Cost:
    """What a layer holds.

    Attributes:
        outputs: like the layer's, without storage.
        graph: autograd records it.
        forward: the most it holds in forward, above what was there before.
        saved: what backward needs, besides inputs and outputs.
        casts: weights in the autocast dtype, kept until the model's forward ends.
        keeps_inputs: the graph keeps the inputs.
        backward: the most it holds in backward and while it is recomputed, above what was there before.
    """

    outputs: Any
    graph: bool
    forward: Bytes
    saved: Bytes
    casts: Bytes
    keeps_inputs: bool
    backward: dict[str, Bytes]


Costs = dict[Any, Cost]  # by what makes layers alike


class Repeats:
    """Runs the layers of a model.

    Attributes:
        casts: what is held until the model's forward ends.
        probing: what is called first is not what is called later.
    """

    def __init__(self, ledger: Ledger, sharding: "Sharding", costs: "Costs") -> None:
        self.ledger, self.sharding = ledger, sharding
        self.casts: list[Hold] = []
        self.probing = False
        self._costs = costs
        self._structures: dict[int, Any] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the calls of every GradientCheckpointingLayer."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        original = GradientCheckpointingLayer.__call__

        def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.call(original, layer, args, kwargs)

        GradientCheckpointingLayer.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            GradientCheckpointingLayer.__call__ = original  # type: ignore[method-assign]

    def call(self, original: Callable[..., Any], layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return what a layer returns, and hold what it holds."""
        self.sharding.enter_forward(layer)
        now = torch.is_grad_enabled(), layer.training, torch.is_autocast_enabled("cpu")
        key = (self._structure(layer), _signature((args, kwargs)), now)
        if key not in self._costs:
            with self.ledger.apart():
                first = self._measure(original, layer, args, kwargs)
            if self.probing:  # kernels have been compared with the code that they replace, this once
                self.ledger.spike(first.forward)
                with self.ledger.apart():
                    first = self._measure(original, layer, args, kwargs)
            self._costs[key] = first
        cost = self._costs[key]
        self.ledger.spike(cost.forward)
        if cost.casts:
            self.casts.append(Hold(self.ledger, cost.casts))
        with self.ledger.during(label=ACTIVATIONS):
            if not cost.graph:
                outputs = _like(cost.outputs)
            else:
                inputs = _needing_grad((args, kwargs), layer)
                flat, spec = tree_flatten(cost.outputs)
                kept = (args, kwargs) if cost.keeps_inputs else None
                flat = _Repeat.apply(self, layer, cost, flat, kept, *inputs)  # type: ignore[no-untyped-call]
                outputs = tree_unflatten(list(flat), spec)
        self.sharding.leave_forward(layer)
        return outputs

    def _structure(self, layer: nn.Module) -> Any:
        if id(layer) not in self._structures:
            modules = tuple(
                (name, type(module), *(x for x in vars(module).values() if isinstance(x, str)))
                for name, module in layer.named_modules()
            )
            tensors = (*layer.named_parameters(), *layer.named_buffers())
            self._structures[id(layer)] = (modules, tuple((n, *_shape(x)) for n, x in tensors))
        return self._structures[id(layer)]

    def _measure(self, original: Callable[..., Any], layer: nn.Module, args: Any, kwargs: Any) -> Cost:
        ledger = self.ledger
        args, kwargs = tree_map(_cut, (args, kwargs))
        saved_storages: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            saved_storages.add(tensor.untyped_storage()._cdata)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with ledger.watch() as forward, ledger.during(label=LAYER), hooks:
            outputs = original(layer, *args, **kwargs)
            alive = Counter(ledger.held)
            torch.clear_autocast_cache()
            casts = difference(alive, ledger.held)
        saved = difference(ledger.held, forward.start)
        leaves = {x.untyped_storage()._cdata: x for x in tree_leaves(outputs) if isinstance(x, Tensor)}
        for leaf in leaves.values():
            saved.subtract(block(LAYER, leaf.untyped_storage().nbytes()))
        saved[ACTIVATIONS] += saved.pop(LAYER, 0)
        graph = any(leaf.requires_grad for leaf in leaves.values())
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        checkpointed = bool(getattr(layer, "gradient_checkpointing", False)) and layer.training
        return Cost(
            outputs=tree_map(_without_storage, outputs),
            graph=graph,
            forward=forward.found.get(ledger.phase, Counter()),
            saved=+saved,
            casts=+casts,
            keeps_inputs=graph and (checkpointed or not given.isdisjoint(saved_storages)),
            backward=self._measure_backward(outputs, _needing_grad((args, kwargs), layer)) if graph else {},
        )

    def _measure_backward(self, outputs: Any, inputs: list[Tensor]) -> dict[str, Bytes]:
        used = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
        grads = [torch.empty_like(x) for x in used]
        leaves = [x for x in inputs if x.is_leaf]
        saved = [x.grad for x in leaves]
        for leaf in leaves:
            leaf.grad = None
        with autocast.outside(), self.ledger.watch() as peaks, self.ledger.during("backward", LAYER):
            if len(leaves) == len(inputs):
                torch.autograd.backward(used, grads)  # type: ignore[no-untyped-call]
            else:  # rotations that other layers have a part in; their backward is no part of this one's
                torch.autograd.grad(used, inputs, grads, allow_unused=True)
        for leaf, grad in zip(leaves, saved, strict=True):
            leaf.grad = grad
        return peaks.found


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, repeats: Repeats, layer: nn.Module, cost: Cost, outputs: Any, kept: Any, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.repeats, ctx.layer, ctx.cost, ctx.kept = repeats, layer, cost, kept
        ctx.hold = Hold(repeats.ledger, cost.saved)
        ctx.inputs = [_without_storage(x) for x in inputs]
        ctx.are_parameters = [isinstance(x, nn.Parameter) for x in inputs]
        made = tuple(_like(outputs))
        ctx.mark_non_differentiable(*(x for x, y in zip(made, outputs, strict=True) if not y.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        repeats, ledger = ctx.repeats, ctx.repeats.ledger
        repeats.sharding.enter_backward(ctx.layer)
        for phase, spike in ctx.cost.backward.items():
            with ledger.during(phase):
                ledger.spike(spike)
        ctx.kept = None
        ctx.hold.release()
        ledger.label = ACTIVATIONS
        taken = repeats.sharding.leave_backward(ctx.layer, not all(ctx.are_parameters))
        found: list[Tensor | None] = []
        for like, is_parameter in zip(ctx.inputs, ctx.are_parameters, strict=True):
            with ledger.during(label=GRADIENTS if is_parameter else ACTIVATIONS):
                found.append(None if taken and is_parameter else _like(like))
        return (None, None, None, None, None, *found)


def _needing_grad(given: Any, layer: nn.Module) -> list[Tensor]:
    """Return what a layer's backward makes gradients of: inputs, weights, rotations shared with others."""
    tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]
    shared: list[Tensor] = []
    covered: set[int] = set()
    for module in layer.modules():
        unit: Any = getattr(module, UNIT, None)
        for rotation in active_rotations(module) if unit is not None else ():
            base: Any = module
            dtype = compute_dtype(base.get_base_layer().weight.dtype, rotation.weight.device.type)
            shared.append(unit.rotation(rotation, dtype))
            covered.add(id(rotation.weight))
    weights = [x for x in layer.parameters() if x.requires_grad and id(x) not in covered]
    return [*tensors, *(x for x in shared if x.requires_grad), *weights]


def _cut(value: Any) -> Any:
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


@dataclass(frozen=True)
class Shape:
    """A tensor that is to be made."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _without_storage(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return Shape(tuple(value.shape), value.stride(), value.dtype, value.requires_grad)


def _like(value: Any) -> Any:
    return tree_map(
        lambda x: torch.empty_strided(x.size, x.stride, dtype=x.dtype) if isinstance(x, Shape) else x, value
    )


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _signature(value: Any) -> Any:
    """Return what has to be equal for two layers to be called alike."""
    leaves, spec = tree_flatten(value)
    return str(spec), tuple(map(_leaf_signature, leaves))


def _leaf_signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        small = type(value) is Tensor and value.numel() <= SMALL and not value.dtype.is_floating_point
        return (*_shape(value), tuple(value.flatten().tolist()) if small else None)
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)
