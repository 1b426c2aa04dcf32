"""The backward pass, one block of heads at a time; written by hand so that it is products and one scan too.

Tensors are rebuilt late and dropped early: the peak decides how long a sequence fits (`budget.py` counts it).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llamafactory_ascend.kernels.gated_delta_rule.chunk import (
    Decay,
    Inputs,
    Options,
    chunk_decay,
    chunk_masks,
    decay_gradient,
    load_normalized,
    normalized_gradient,
    scan,
    set_slots,
    transition,
)
from llamafactory_ascend.kernels.gated_delta_rule.forward import Saved
from llamafactory_ascend.kernels.gated_delta_rule.layout import Layout


class Gradients(NamedTuple):
    """Gradients of `Inputs`: in chunk layout for one block, laid out as the inputs for all heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor


def backward_block(
    inputs: Inputs, saved: Saved, d_output: Tensor, d_final: Tensor | None, layout: Layout, options: Options
) -> Gradients:
    """Return the gradients of one block, in chunk layout.

    Args:
        inputs: what the forward pass was given.
        saved: what it kept.
        d_output: gradient of the output, padded [B, T, H, V].
        d_final: gradient of the final states [sequences, H, K, V]; None for zero.
        layout: how the batch is cut.
        options: how to compute.
    """
    dtype = options.dtype
    inverse, entering = saved.inverse, saved.states[:-1].flatten(0, 1)
    key, key_norm = load_normalized(inputs.key, layout, options, inputs.group, 1.0)
    query, query_norm = load_normalized(inputs.query, layout, options, inputs.group, options.scale)
    beta = layout.split(inputs.beta, dtype).unsqueeze(2)
    masks = chunk_masks(layout.chunk_size, key.device, dtype)
    decay = chunk_decay(layout.split(inputs.g, dtype), masks)
    beta_decay = beta * decay.from_start
    w = torch.bmm(inverse, key * beta_decay)
    attention = torch.bmm(query, key.transpose(1, 2)).mul_(decay.pairwise)
    d_output = layout.split(d_output, dtype)

    d_leaving, d_initial = _run_state_gradients(query, key, w, attention, decay, d_output, d_final, layout)

    u = torch.bmm(inverse, layout.split(inputs.value, dtype).mul_(beta))
    corrected = u.baddbmm_(w, entering, alpha=-1)
    del u, w
    entering_t = entering.transpose(1, 2)
    d_query = torch.bmm(d_output, entering_t)
    d_attention = torch.bmm(d_output, corrected.transpose(1, 2))
    d_corrected = torch.bmm(attention.transpose(1, 2), d_output)
    del d_output
    d_corrected.baddbmm_(key * decay.to_end, d_leaving)
    d_key = torch.bmm(corrected, d_leaving.transpose(1, 2))
    d_total = torch.bmm(d_leaving.flatten(1).unsqueeze(1), entering.flatten(1).unsqueeze(2))
    del d_leaving

    d_value = torch.bmm(inverse.transpose(1, 2), d_corrected)  # of beta * value
    del d_corrected
    d_lower = torch.bmm(d_value, corrected.transpose(1, 2)).mul_(masks.below).neg_()
    del corrected
    d_beta_key = torch.bmm(d_value, entering_t).neg_()  # of beta * from_start * key

    # Through Gamma and beta. `key_part` is sum_k d_key_k key_k of the key decayed to the chunk's end.
    key_part = (d_key * key).sum(2, keepdim=True).mul_(decay.to_end)
    beta_part = (d_beta_key * key).sum(2, keepdim=True).mul_(decay.from_start)
    d_from_start = (d_query.mul_(decay.from_start) * query).sum(2, keepdim=True).addcmul_(beta_part, beta)
    d_from_start[:, -1:].addcmul_(d_total, decay.total)
    d_gamma = torch.bmm(key, key.transpose(1, 2)).mul_(decay.pairwise).mul_(d_lower)
    d_beta = d_gamma.sum(2, keepdim=True).add_(beta_part)
    d_gamma.mul_(beta).addcmul_(d_attention, attention)
    del attention
    d_gamma[:, -1].add_(key_part.squeeze(2))
    d_g = decay_gradient(d_gamma, d_from_start.squeeze(2), masks)
    del d_gamma

    d_beta.add_((layout.split(inputs.value, dtype).mul_(d_value)).sum(2, keepdim=True))
    d_value.mul_(beta)
    d_lower.mul_(decay.pairwise).mul_(beta)
    d_attention.mul_(decay.pairwise)
    d_key.mul_(decay.to_end).addcmul_(d_beta_key, beta_decay)
    del d_beta_key
    d_key.baddbmm_(d_attention.transpose(1, 2), query)
    d_key.baddbmm_(d_lower + d_lower.transpose(1, 2), key)
    d_query.baddbmm_(d_attention, key)
    return Gradients(
        normalized_gradient(d_query, query, query_norm, options.scale),
        normalized_gradient(d_key, key, key_norm, 1.0),
        d_value,
        d_g,
        d_beta.squeeze(2),
        d_initial,
    )


def _run_state_gradients(
    query: Tensor,
    key: Tensor,
    w: Tensor,
    attention: Tensor,
    decay: Decay,
    d_output: Tensor,
    d_final: Tensor | None,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the state that leaves each chunk [N, K, V] and of the initial states."""
    chunks = layout.chunks
    blocks, key_dim, value_dim = key.shape[0] // chunks, key.shape[2], d_output.shape[2]
    final = None if d_final is None else layout.split_states(d_final, key.dtype)
    gradients = key.new_empty(chunks + 1, blocks, key_dim, value_dim)
    # The output as a function of the entering state alone: output = reading @ state + attention @ u.
    reading = (query * decay.from_start).baddbmm_(attention, w, alpha=-1)
    torch.bmm(reading.transpose(1, 2), d_output, out=gradients[:-1].view(-1, key_dim, value_dim))
    del reading

    matrices = transition(key * decay.to_end, w, decay.total).transpose(1, 2)
    slots = gradients.unbind(0)
    sources: list[Tensor | None] = list(slots[1:])
    for number, end in enumerate(layout.ends):
        sources[end] = None if final is None else final[number]
    scan(reversed(slots[:-1]), reversed(torch.split(matrices, blocks)), reversed(sources))

    d_initial = torch.stack([slots[start] for start in layout.starts])
    set_slots(gradients, [end + 1 for end in layout.ends], final)
    return gradients[1:].view(-1, key_dim, value_dim), d_initial


def backward(
    inputs: Inputs,
    saved: list[Saved],
    d_output: Tensor,
    d_final: Tensor | None,
    layout: Layout,
    options: Options,
    head_block: int,
) -> Gradients:
    """Return the gradients of all heads, padded like the inputs; those of tokens in the inputs' dtypes.

    Args:
        inputs: what the forward pass was given.
        saved: one `Saved` per block of heads, as `forward` returned them.
        d_output: gradient of the output, padded [B, T, H, V].
        d_final: gradient of the final states [sequences, H, K, V]; None for zero.
        layout: how the batch is cut.
        options: how to compute.
        head_block: value heads of a block, as in `forward`.
    """
    heads, group = inputs.value.shape[2], inputs.group
    totals = None
    for start, kept in zip(range(0, heads, head_block), saved, strict=True):
        values = slice(start, min(start + head_block, heads))
        keys = slice(values.start // group, values.stop // group)
        d_state = None if d_final is None else d_final[:, values]
        block = backward_block(
            inputs.heads(values.start, values.stop), kept, d_output[:, :, values], d_state, layout, options
        )
        d_initial = layout.join_states(block.initial_state)
        if totals is None:  # only now, so that with one block they are not alive at the peak
            states = d_initial.new_empty(d_initial.shape[0], heads, *d_initial.shape[2:])
            query, key, value, g, beta = (x.new_empty(x.shape) for x in inputs[:5])
            totals = Gradients(query, key, value, g, beta, states)
        layout.join(block.query, totals.query[:, :, keys], group)
        layout.join(block.key, totals.key[:, :, keys], group)
        layout.join(block.value, totals.value[:, :, values])
        layout.join(block.g, totals.g[:, :, values])
        layout.join(block.beta, totals.beta[:, :, values])
        totals.initial_state[:, values].copy_(d_initial)
        del block
    assert totals is not None  # there is at least one head
    return totals
