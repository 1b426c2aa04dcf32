"""One training step and one evaluation of a model without weights, phase by phase."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.kernels.gated_delta_rule.chunk import chunk_masks
from llamafactory_ascend.kernels.switch import Switch
from llamafactory_ascend.memory import autocast, fakes, ledger, operators
from llamafactory_ascend.memory.fsdp2 import FullyShard, Policy
from llamafactory_ascend.memory.ledger import Bytes, Ledger
from llamafactory_ascend.memory.repeats import Costs, Repeats
from llamafactory_ascend.memory.sharding import Replicas, Sharding

PHASES = ("load", "forward", "recompute", "backward", "optimizer", "evaluation", "saving")
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """How a model is trained.

    Attributes:
        batch: what the data collator returns for one micro-batch, on the CPU.
        eval_batch: the same for an evaluation; None where there is none.
        accumulation: micro-batches of an optimizer step.
        autocast: dtype of mixed precision, None without.
        optimizer: makes the optimizer of the parameters it is given.
        max_grad_norm: gradients are clipped to it; 0: not.
        cards: ranks.
        policy: how FSDP2 shards; None: DDP on several cards.
        switches: of kernels that are compared with the old code when they are first called.
    """

    batch: Batch
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    eval_batch: Batch | None = None
    accumulation: int = 1
    autocast: torch.dtype | None = None
    max_grad_norm: float = 1.0
    cards: int = 1
    policy: Policy | None = None
    switches: Sequence[Switch] = ()


def measure(model: nn.Module, plan: Plan, costs: Costs | None = None) -> dict[str, Bytes]:
    """Return the most that one card holds in each phase, by kind.

    Args:
        model: on the meta device, as it is trained: adapters, checkpointing and kernels are in place. It is
            left as it was.
        plan: how it is trained.
        costs: of layers that have been measured, to be added to; for several plans of the same model.
    """
    mode = fakes.new_mode()
    book = Ledger()
    with ExitStack() as stack:
        for context in (
            fakes.without_storage(model, mode, plan.policy.computed if plan.policy else None),
            autocast.as_on_an_npu(),
            operators.in_place_of_torch_npu(),
            mode,
            book,
        ):
            stack.enter_context(context)
        stack.callback(chunk_masks.cache_clear)
        _Step(model, plan, book, {} if costs is None else costs).run()
    return {phase: found for phase, found in book.peaks.found.items() if phase in PHASES}


class _Step:
    def __init__(self, model: nn.Module, plan: Plan, book: Ledger, costs: Costs) -> None:
        self.model, self.plan, self.book = model, plan, book
        self.sharding = _sharding(model, plan, book)
        self.repeats = Repeats(book, self.sharding, costs)

    def run(self) -> None:
        book, plan, model = self.book, self.plan, self.model
        with book.during("load", ledger.WEIGHTS):
            self.sharding.load()
        trained = self.sharding.trained()
        optimizer = plan.optimizer(trained)
        with self.repeats.installed(), _losses_apart(model, book), _recomputing(model, book):
            inputs = self._on_the_card(plan.batch, plan.accumulation)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    hook: Any = parameter.register_post_accumulate_grad_hook
                    hook(self._label_gradient)
            for switch in plan.switches:
                switch.armed = True
            for first in (True, False):  # the second step has the optimizer's states from the beginning
                self.repeats.probing = first and bool(plan.switches)
                for micro_batch in inputs:
                    self._micro_batch(micro_batch)
                with book.during("optimizer", ledger.OPTIMIZER):
                    self._update(optimizer, trained)
            del inputs
        if plan.eval_batch is not None:
            with book.during("evaluation"), self.repeats.installed(), _losses_apart(model, book):
                self._evaluate(plan.eval_batch)
        with book.during("saving", ledger.COLLECTIVES):
            self.sharding.save()

    def _label_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.book.relabel(parameter.grad, ledger.GRADIENTS)

    def _on_the_card(self, batch: Batch, count: int) -> list[dict[str, Any]]:
        """Charge as many copies of a batch; the Trainer fetches those of an optimizer step at once."""
        with self.book.during(label=ledger.INPUTS):
            return [{name: _copy(value) for name, value in batch.items()} for _ in range(count)]

    def _forward(self, batch: Batch) -> Any:
        self.sharding.enter_model()
        forward = self.model.forward
        with autocast.autocast(self.plan.autocast):
            output = forward(**{name: self.sharding.cast(value) for name, value in batch.items()})
        if self.plan.autocast is not None:
            output = _to_float32(output)
        self.repeats.casts.clear()
        self.sharding.leave_model()
        return output

    def _micro_batch(self, batch: dict[str, Any]) -> None:
        book = self.book
        with book.during("forward", ledger.ACTIVATIONS):
            supervised = torch.tensor(1)
            loss = self._forward({**batch, "num_items_in_batch": supervised})["loss"]
        with book.during("backward", ledger.LOSS):
            self.sharding.begin_backward()
            loss.backward()
            self.sharding.end_backward()

    def _update(self, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
        self.sharding.give_gradients()
        if self.plan.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained, self.plan.max_grad_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)

    def _evaluate(self, batch: Batch) -> None:
        inputs = self._on_the_card(batch, 1)[0]
        self.model.eval()
        try:
            with torch.no_grad(), self.book.during(label=ledger.ACTIVATIONS):
                self._forward(inputs)
        finally:
            self.model.train()


def _sharding(model: nn.Module, plan: Plan, book: Ledger) -> Sharding:
    if plan.policy is not None:
        return FullyShard(model, book, plan.cards, plan.policy)
    return (Replicas if plan.cards > 1 else Sharding)(model, book, plan.cards)


@contextmanager
def _losses_apart(model: nn.Module, book: Ledger) -> Iterator[None]:
    """Charge what is made from the model's head on to the loss."""
    base: Any = model
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    head = base.get_output_embeddings()

    def begin(*_: Any) -> None:
        book.label = ledger.LOSS

    handle = head.register_forward_pre_hook(begin)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _recomputing(model: nn.Module, book: Ledger) -> Iterator[None]:
    """Tell the layers that backward computes again from backward itself."""
    function = checkpointing.installed(model)
    if function is None:
        yield
        return
    saved = dict(function.kwargs)
    function.kwargs["context_fn"] = lambda: (nullcontext(), book.during("recompute"))
    try:
        yield
    finally:
        function.kwargs = saved


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _to_float32(output: Any) -> Any:
    from accelerate.utils.operations import convert_to_fp32

    return convert_to_fp32(output)
