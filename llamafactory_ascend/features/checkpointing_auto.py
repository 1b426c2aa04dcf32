"""`checkpointing: auto`: as many layers un-recomputed as a memory budget allows, from measured steps.

Nothing is estimated. A batch that no measured one covers runs with every layer recomputed, as `full` does,
and is measured: its peak, and what each layer's recomputation leaves allocated. Only a batch that a measured
one covers, shape by shape, keeps layers, and before each forward pass what is allocated then and the bound of
the batch must fit. So the budget is held wherever `full` holds it. To repeat a step that ran out of memory is
not tried: gradients are half accumulated, and under FSDP the other ranks wait in a collective.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from llamafactory_ascend import device, log
from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.checkpointing_budget import (
    RESERVE,
    Batch,
    budget_bytes,
    covers,
    gib,
    size_of,
)
from llamafactory_ascend.features.layers import plan

if TYPE_CHECKING:
    from llamafactory_ascend.features.checkpointing_budget import Size
    from llamafactory_ascend.features.checkpointing_proof import CheckpointingProof
    from llamafactory_ascend.run import Run


@dataclass(frozen=True)
class Pass:
    """A forward pass and its backward, under way.

    Attributes:
        batch: what was known of its size, None where nothing was.
        base: bytes allocated before it.
        kept: layers.
    """

    size: "Size"
    batch: Batch | None
    base: int
    kept: int


class CheckpointingAuto(TrainerCallback):  # type: ignore[misc]
    """Measures each forward and backward pass, and says before each how many layers are kept.

    All ranks keep the same number in each pass, the smallest that fits on any of them: under FSDP1, ranks
    that recomputed different layers have waited for each other for ever. The all-reduce of an integer that it
    takes comes where the Trainer has just waited for the loss.
    """

    def __init__(self, run: "Run", proof: "CheckpointingProof") -> None:
        self.run, self.proof = run, proof
        self.handles: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.close()  # of an attempt that ran out of memory
        self.function = checkpointing.installed(model)
        self.under_way: Pass | None = None
        self.batches: list[Batch] = []
        self.layers: list[int] = []  # ids, in the order in which they are kept
        self.kept = self.base = self.before = self.highest = 0
        self.given_up = ""
        self.run.facts.pop("checkpointing budget", None)
        if self.function is None:
            return  # the proof has said so
        self.function.kept = frozenset()
        self.where, self.type = args.device, args.device.type
        self.device: Any = torch.get_device_module(args.device)
        self.available = device.available(self.type)
        self.budget = budget_bytes(self.run.settings.memory_budget, self.available)
        self.handles = [
            # Before FSDP2 gathers the root: what it frees again is part of what the pass needs.
            model.register_forward_pre_hook(self.begin, prepend=True, with_kwargs=True),
            model.register_forward_hook(self.watch),
        ]

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Decide how many layers this forward pass keeps, and start to measure it."""
        if self.function is None or self.given_up or not (torch.is_grad_enabled() and model.training):
            return
        if self.under_way is not None:
            self.give_up("the model is called twice before a backward")
            return
        if not self.layers:
            self.layers = order(model)
        size, base = size_of(args, kwargs), self.device.memory_allocated()
        known = [batch for batch in self.batches if covers(batch.size, size)]
        batch = min(known, key=lambda batch: batch.needs[self.kept], default=None)
        fitting = min(self.kept, batch.fit(self.room(base))) if batch is not None else 0
        kept = agree(fitting, self.where)
        self.function.kept = frozenset(self.layers[:kept])
        self.function.meter = self.device.memory_allocated if batch is None else None
        self.function.saved_bytes.clear()
        device.restart_peak(self.type)
        self.under_way = Pass(size, batch, base, kept)

    def watch(self, model: nn.Module, args: Any, output: Any) -> None:
        """Have the measurement ended with the backward of what the model returns."""
        if self.under_way is None:
            return
        values = output.values() if isinstance(output, Mapping) else output
        values = (values,) if isinstance(values, torch.Tensor) else values
        found = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        torch.autograd.graph.register_multi_grad_hook(found, self.backward_begins, mode="any")

    def backward_begins(self, gradient: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """Take in what forward and backward have needed; called once backward is through."""
        if self.under_way is None or self.function is None:
            return  # given up
        found, self.under_way = self.under_way, None
        peak = self.device.max_memory_allocated()
        need = peak - min(found.base, self.device.memory_allocated())  # something else may have been freed
        self.base, self.highest = max(self.base, found.base), max(self.highest, peak)
        if found.batch is None:
            saved = [self.function.saved_bytes[layer] for layer in self.layers]
            others = [batch for batch in self.batches if not covers(found.size, batch.size)]
            self.batches = [*others, Batch(found.size, need, saved)]
            self.function.meter = None
        else:
            found.batch.learn(found.size, found.kept, need)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.function is not None:
            self.base, self.before = 0, self.device.memory_allocated()

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self.function is None:
            return
        # After the first step there is the optimizer's state, too.
        self.base += max(self.device.memory_allocated() - self.before, 0)
        fitting = [batch.fit(self.room(self.base)) for batch in self.batches]
        before, self.kept = self.kept, agree(0 if self.given_up else min(fitting, default=0), self.where)
        if self.kept != before or "checkpointing budget" not in self.run.facts:
            self.decide(state.global_step)
            self.proof.count_again(model)
        if self.highest > self.budget:
            even = " although every layer is recomputed" if not self.kept else ""
            message = f"a step has needed more than the budget of {gib(self.budget)}{even}"
            self.run.find("warning", "checkpointing", message)
        self.report()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def give_up(self, reason: str) -> None:
        """Recompute every layer from here on."""
        assert self.function is not None
        self.given_up, self.under_way = reason, None
        self.function.kept, self.function.meter = frozenset(), None
        self.run.find("warning", "checkpointing", f"auto: {reason}, so every layer is recomputed")

    def room(self, base: int) -> int:
        """Return the bytes that a pass may need."""
        return int(self.budget * (1 - RESERVE)) - base

    def decide(self, step: int) -> None:
        """Record and say what the next steps keep."""
        total = len(self.layers)
        largest = max((self.base + batch.needs[0] for batch in self.batches), default=0)
        choice = f"{checkpointing.OURS}, but the last {self.kept} of {total}"
        reason = f"step {step}: {gib(largest)} with all recomputed, a budget of {gib(self.budget)}"
        if not self.kept:
            choice = checkpointing.OURS
            reason = self.given_up or f"{reason}: no room for more"
        self.run.decide("checkpointing", choice, f"`auto`: {reason}")
        log.info(f"checkpointing: {self.kept} of {total} layers are not recomputed; {reason}")

    def report(self) -> None:
        self.run.facts["checkpointing budget"] = {
            "bytes": self.budget,
            "available": self.available,
            "kept": self.kept,
            "of": len(self.layers),
            "peak_recomputed": max((self.base + batch.needs[0] for batch in self.batches), default=0),
            "peak": self.highest,
            "measured_sizes": len(self.batches),
        }


def order(model: nn.Module) -> list[int]:
    """Return the ids of the layers that take part in backward, those that backward comes to first first."""
    layers = [(key, layer.component) for key, layer in plan(model).items() if layer.needs_graph]
    parts = [
        [key for key, component in layers if component == part] for part in ("text", "projector", "vision")
    ]
    return [key for part in parts for key in reversed(part)]


def agree(kept: int, where: torch.device) -> int:
    """Return the smallest of all ranks' numbers."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return kept
    number = torch.tensor(kept, dtype=torch.int32, device=where)
    dist.all_reduce(number, dist.ReduceOp.MIN)
    return int(number.item())
