"""What a training step changes, kept in host memory and put back, so that the step leaves no trace.

A step at a learning rate of 0 would leave traces: the optimizer's moments and counts, and weights that are
no longer numbers where a gradient is not. So weights and optimizer state are copied: for LoRA a few MB; for
full fine-tuning a copy of this rank's part of the weights, and where a run is resumed of its optimizer state.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import Trainer

Restore = Callable[[], Any]
# What the trainers of dpo and kto count as they compute a loss, and how to copy it: metrics until they are
# logged, and moving means of rewards (`pref_bco_weight`), which hold on to the accelerator.
STAGES: dict[str, Callable[[Any], Any]] = {"_stored_metrics": copy.deepcopy, "running": copy.copy}


def keep(value: Any) -> Restore:
    """Return a function that returns the value as it is now: tensors and parameters the same, refilled."""
    if isinstance(value, Tensor):
        local = _local(value)
        saved = local.to("cpu", copy=True)

        def refill() -> Tensor:
            local.copy_(saved)
            return value

        return refill
    if isinstance(value, dict):
        parts = {key: keep(part) for key, part in value.items()}
        return lambda: {key: part() for key, part in parts.items()}
    if isinstance(value, list):
        items = [keep(item) for item in value]
        return lambda: [item() for item in items]
    kept = copy.deepcopy(value)
    return lambda: kept


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    plain = tensor.detach()
    part: Tensor = getattr(plain, "to_local", lambda: plain)()
    return part


@torch.no_grad()
def keep_weights(model: nn.Module) -> Restore:
    """Keep the trainable parameters, and the buffers that a forward may change (running means, counts)."""
    buffers = [one for one in model.buffers() if one.is_floating_point() or one.dim() == 0]
    return _without_graph(keep([*(p for p in model.parameters() if p.requires_grad), *buffers]))


@torch.no_grad()
def keep_optimizer(optimizer: Any) -> Restore:
    """Keep an optimizer's state, empty before its first step, and the options of its groups."""
    state = {parameter: keep(entries) for parameter, entries in optimizer.state.items()}
    options = [keep({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]

    def restore() -> None:
        optimizer.state.clear()
        optimizer.state.update({parameter: entries() for parameter, entries in state.items()})
        for group, found in zip(optimizer.param_groups, options, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({"params": parameters, **found()})

    return _without_graph(restore)


def _without_graph(restore: Restore) -> Restore:
    def restored() -> Any:
        with torch.no_grad():
            return restore()

    return restored


@contextmanager
def random_states(device: torch.device) -> Iterator[None]:
    """Put back the random states of Python, NumPy, torch and this rank's device."""
    devices = [] if device.type == "cpu" else [torch.get_device_module(device).current_device()]
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def loss_scale(scaler: Any) -> Iterator[None]:
    """Let fp16 scale by 1: a first step that overflows would be left out, and the optimizer with it."""
    if scaler is None or not scaler.is_enabled():
        yield
        return
    state = scaler.state_dict()
    scaler.load_state_dict({**state, "scale": 1.0})
    try:
        yield
    finally:
        scaler.load_state_dict(state)


def stand_in(trainer: "Trainer") -> Any:
    """Return a Trainer of the same model and optimizer, whose attributes and metrics are its own."""
    found: Any = copy.copy(trainer)
    for name, copied in STAGES.items():
        if hasattr(trainer, name):
            setattr(found, name, copied(getattr(trainer, name)))
    return found
