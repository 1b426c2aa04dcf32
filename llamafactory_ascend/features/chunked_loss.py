"""A language model whose loss is computed without its logits, where nobody but the loss wants them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from llamafactory_ascend.kernels.linear_cross_entropy import linear_cross_entropy

OWNER = "ascend_chunked_loss"  # attribute of the model and of its head


class ChunkedLoss:
    """Stands between a model's head and its loss function.

    The model is left to do what it does, `loss_function(lm_head(hidden_states), labels)`, and while it is
    called for its loss alone, its head passes the hidden states on and its loss function applies the head to
    them chunk by chunk. The model's own forward is not copied, so what it does before and after (auxiliary
    losses, shifting, counts of tokens) stays its own.

    What is put into the model finds its ChunkedLoss through the module that it is called for, so that a copy
    of the model has one of its own; a model that is pickled comes back as stock made it.

    Attributes:
        calls: of the chunked loss.
        loss_only: an evaluation asks for nothing but the loss.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls = 0
        self.loss_only = False
        self.wanted = False  # the model is being called for its loss alone
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


def _chunked(stock: Callable[..., Any]) -> Callable[..., Any]:
    # No hook, because PEFT calls `forward` itself; wrapped, because the Trainer reads its signature.
    @functools.wraps(stock)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        loss: ChunkedLoss = getattr(model, OWNER)
        loss.wanted = kwargs.get("labels") is not None and (model.training or loss.loss_only)
        try:
            output = stock(model, *args, **kwargs)
        finally:
            passed, loss.wanted, loss.passed = loss.passed, False, False
        # What stands for the logits are hidden states: nobody may take them for logits.
        return without_logits(output) if passed else output

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
