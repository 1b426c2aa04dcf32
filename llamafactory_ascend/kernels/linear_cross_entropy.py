"""Cross entropy of a language model's head, in chunks of the supervised positions alone.

Logits of T positions over a vocabulary of V take T x V numbers several times over (as the model's dtype, in
float32, as gradients): 4,096 positions of a 248,320-word vocabulary are 3.8 GiB in float32 alone. Only the
loss and the gradient of the hidden states are wanted, and a position's need nothing but its own logits:

    loss_t = logsumexp(W h_t) - (W h_t)[y_t]        d loss_t / d h_t = W^T (softmax(W h_t) - onehot(y_t))

Positions that are not supervised have no loss and no gradient and are never multiplied with W. Of a sum of
losses both are made while a chunk's logits exist, in the forward pass, and backward only scales. Where each
position's own likelihood is wanted, what it counts for is not known before backward, which makes a chunk's
logits once more.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the sum of the cross entropies of ``hidden @ weight.T`` at the positions with a label.

    The product is done in the autocast dtype where autocast is on, else in that of ``weight``; everything
    after it in float32, as Transformers does (``loss/loss_utils.py``: ``ForCausalLMLoss``).

    Args:
        hidden: [N, H], the states that the head is applied to.
        weight: [V, H], of a head without bias.
        labels: [N] integers, already shifted; ``ignore_index`` where there is none.

    Returns:
        A float32 scalar; 0 where nothing is supervised.
    """
    loss: Tensor = _apply(_LinearCrossEntropy, hidden, weight, labels, ignore_index)
    return loss


def label_likelihoods(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the logarithms of the probabilities that ``hidden @ weight.T`` gives to the labels.

    Args and dtypes are those of ``linear_cross_entropy``.

    Returns:
        [N], float32; 0 where there is no label.
    """
    likelihoods: Tensor = _apply(_LabelLikelihoods, hidden, weight, labels, ignore_index)
    return likelihoods


def _apply(function: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Any:
    rows = (labels != ignore_index).nonzero().squeeze(-1)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    with torch.autocast(kind, enabled=False):
        return function.apply(hidden, weight, rows, labels[rows], dtype)


def chunk_rows(rows: int, width: int, vocabulary: int) -> int:
    """Return the positions of a chunk, at least 32: its logits are as many numbers as all hidden states.

    What one more tensor like the hidden states costs is small beside what a decoder layer needs, and fewer
    rows would leave a matrix unit idle.
    """
    return max(32, -(-rows * width // vocabulary))


def _chunks(picked: Tensor, targets: Tensor, head: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield a chunk's rows, its labels as a column, and the log-probabilities of all words in float32."""
    count, width = picked.shape
    step = chunk_rows(count, width, len(head))
    for start in range(0, count, step):
        rows = slice(start, start + step)
        yield rows, targets[rows, None], (picked[rows] @ head.T).float().log_softmax(-1)


def _softmax_less_labels(likelihoods: Tensor, wanted: Tensor) -> Tensor:
    """Return the gradient of the cross entropies with respect to the logits, in the argument's memory."""
    errors = likelihoods.exp_()
    return errors.scatter_add_(-1, wanted, errors.new_full((1, 1), -1).expand_as(wanted))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, dtype: torch.dtype
    ) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        head, picked = weight.to(dtype), hidden.index_select(0, rows).to(dtype)
        grad_picked = torch.empty_like(picked) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for chunk, wanted, likelihoods in _chunks(picked, targets, head):
            loss -= likelihoods.gather(-1, wanted).sum()
            if not (need_hidden or need_weight):
                continue
            errors = _softmax_less_labels(likelihoods, wanted).to(dtype)
            if grad_picked is not None:
                torch.mm(errors, head, out=grad_picked[chunk])
            if grad_weight is not None:
                grad_weight += errors.T @ picked[chunk]
        ctx.shape, ctx.dtype, ctx.weight_dtype = hidden.shape, hidden.dtype, weight.dtype
        ctx.save_for_backward(grad_picked, grad_weight, rows)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        grad_picked, grad_weight, rows = ctx.saved_tensors
        grad_hidden = None
        if grad_picked is not None:
            grad_hidden = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)
            grad_hidden.index_copy_(0, rows, (grad_picked * grad).to(ctx.dtype))
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


class _LabelLikelihoods(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.product_dtype = dtype
        ctx.save_for_backward(hidden, weight, rows, targets)
        found = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        picked = hidden.index_select(0, rows).to(dtype)
        for chunk, wanted, likelihoods in _chunks(picked, targets, weight.to(dtype)):
            found[rows[chunk]] = likelihoods.gather(-1, wanted).squeeze(-1)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        hidden, weight, rows, targets = ctx.saved_tensors
        dtype, (need_hidden, need_weight) = ctx.product_dtype, ctx.needs_input_grad[:2]
        head, picked = weight.to(dtype), hidden.index_select(0, rows).to(dtype)
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        for chunk, wanted, likelihoods in _chunks(picked, targets, head):
            scale = grad[rows[chunk], None].float()
            errors = _softmax_less_labels(likelihoods, wanted).mul_(-scale).to(dtype)
            if grad_hidden is not None:
                grad_hidden[rows[chunk]] = (errors @ head).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += errors.T @ picked[chunk]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None
