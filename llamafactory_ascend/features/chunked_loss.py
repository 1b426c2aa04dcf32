"""A language model whose loss, or whose labels' likelihoods, are computed without its logits."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llamafactory_ascend.kernels.linear_cross_entropy import label_likelihoods, linear_cross_entropy

OWNER = "ascend_chunked_loss"  # attribute of the model and of its head


@dataclass
class Likelihoods:
    """What somebody wants of a model's calls in place of their logits.

    Attributes:
        labels: [B, T], not shifted; -100 where there is none.
        logit_sums: [B], float32, of a call's logits over all positions and words; None before the call.
        logit_count: how many logits that are in a row.
    """

    labels: Tensor
    logit_sums: Tensor | None = None
    logit_count: int = 0


class ChunkedLoss:
    """Stands between a model's head and its loss function.

    The model is left to do what it does, `loss_function(lm_head(hidden_states), labels)`, and while it is
    called for its loss alone, its head passes the hidden states on and its loss function applies the head to
    them chunk by chunk. The model's own forward is not copied, so what it does before and after (auxiliary
    losses, shifting, counts of tokens) stays its own.

    What is put into the model finds its ChunkedLoss through the module that it is called for, so that a copy
    of the model has one of its own; a model that is pickled comes back as stock made it.

    Preference trainers compute their loss themselves, from the logits of a call without labels. While they
    say which labels they are interested in (``likelihoods_of``), the model returns the log-probabilities of
    those where its logits would be.

    Attributes:
        calls: of the chunked loss, or for likelihoods.
        loss_only: an evaluation asks for nothing but the loss.
        asked: for likelihoods in place of logits.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls = 0
        self.loss_only = False
        self.asked: Likelihoods | None = None
        self.wanted = False  # the model is being called for its loss alone, or for likelihoods
        self.passed = False  # the head has passed the hidden states on
        self._stock_loss: Any = self.model.loss_function
        self._put(self.model, _chunked(type(self.model).forward))
        self._put(self.model.lm_head, _passing(nn.Linear.forward))
        self.model.loss_function = self._loss

    def _put(self, module: Any, forward: Callable[..., Any]) -> None:
        setattr(module, OWNER, self)
        module.forward = MethodType(forward, module)

    def _loss(self, logits: Tensor, labels: Tensor, vocab_size: int, *args: Any, **kwargs: Any) -> Tensor:
        if not self.passed:  # a head that was put in later, by a resized vocabulary, has made logits
            found: Tensor = self._stock_loss(logits, labels, vocab_size, *args, **kwargs)
            return found
        self.calls += 1
        return causal_lm_loss(logits, self.model.lm_head.weight, labels, *args, **kwargs)

    def finish(self, output: Any) -> Any:
        """Return a model's output with what was asked for in place of logits: now hidden states are there."""
        if self.asked is None:
            return without_logits(output)
        self.calls += 1
        hidden, weight, labels = output.logits, self.model.lm_head.weight, self.asked.labels
        self.asked.logit_sums = sum_logits(hidden.detach(), weight.detach())
        self.asked.logit_count = hidden.shape[1] * weight.shape[0]
        return type(output)(**{**output, "logits": next_likelihoods(hidden, weight, labels)})


def _chunked(stock: Callable[..., Any]) -> Callable[..., Any]:
    # No hook, because PEFT calls `forward` itself; wrapped, because the Trainer reads its signature.
    @functools.wraps(stock)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        loss: ChunkedLoss = getattr(model, OWNER)
        for_loss = kwargs.get("labels") is not None and (model.training or loss.loss_only)
        loss.wanted = for_loss or loss.asked is not None
        try:
            output = stock(model, *args, **kwargs)
        finally:
            passed, loss.wanted, loss.passed = loss.passed, False, False
        # What stands for the logits are hidden states: nobody may take them for logits. And only in here are
        # the parameters of a sharded model whole.
        return loss.finish(output) if passed else output

    return forward


def _passing(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def forward(head: Any, hidden: Tensor) -> Tensor:
        loss: ChunkedLoss = getattr(head, OWNER)
        loss.passed = loss.wanted
        return hidden if loss.passed else F.linear(hidden, head.weight)

    return forward


def causal_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return what Transformers' ``ForCausalLMLoss`` returns for the logits ``hidden @ weight.T``.

    Args:
        hidden: [B, T, H].
        weight: [V, H].
        labels: [B, T], not shifted.
        num_items_in_batch: what the sum is divided by; None: the supervised positions.
        shift_labels: [B, T], where the caller has shifted them.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat = shift_labels.reshape(-1).to(hidden.device)
    loss = linear_cross_entropy(hidden.reshape(-1, hidden.shape[-1]), weight, flat, ignore_index)
    if num_items_in_batch is None:
        return loss / (flat != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def next_likelihoods(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities of the labels, each at the position before its own.

    Args:
        hidden: [B, T, H].
        weight: [V, H].
        labels: [B, T], not shifted; -100 where there is none.

    Returns:
        [B, T], float32; 0 where there is no label, and at the last position.

    Raises:
        ValueError: hidden states and labels are not of the same length.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(f"{tuple(labels.shape)} labels for {tuple(hidden.shape[:-1])} positions")
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].to(hidden.device)
    found = label_likelihoods(hidden.flatten(0, 1), weight, shifted.flatten())
    return found.view(labels.shape)


def sum_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return each row's sum of ``hidden @ weight.T`` over positions and words: [B], float32."""
    return (hidden.sum(1, dtype=torch.float32) * weight.sum(0, dtype=torch.float32)).sum(-1)


def without_logits(output: Any) -> Any:
    """Return a model's output with no logits in it; a tuple keeps its length."""
    if isinstance(output, tuple):
        return (output[0], None, *output[2:])
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})


def unfit(model: nn.Module) -> str:
    """Return why a model's loss cannot be chunked, "" if it can."""
    head = getattr(model, "lm_head", None)
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a plain linear layer"
    if head.bias is not None:
        return "its head has a bias"
    if head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head):
        return "somebody else acts on the output of its head"
    if "forward" in vars(model):
        return "its forward has been replaced by somebody else"
    return ""


@contextmanager
def only_the_loss(loss: ChunkedLoss | None, asked: bool) -> Iterator[None]:
    """Let an evaluation that wants nothing but the loss have it chunked too."""
    if loss is None or not asked:
        yield
        return
    loss.loss_only = True
    try:
        yield
    finally:
        loss.loss_only = False


@contextmanager
def likelihoods_of(labels: Tensor, losses: Sequence[ChunkedLoss]) -> Iterator[Likelihoods]:
    """Let the models' calls return the log-probabilities of labels in place of logits."""
    asked = Likelihoods(labels)
    for loss in losses:
        loss.asked = asked
    try:
        yield asked
    finally:
        for loss in losses:
            loss.asked = None
