"""The forward pass, one block of heads at a time."""

from typing import NamedTuple

import torch
from torch import Tensor

from llamafactory_ascend.kernels.gated_delta_rule.chunk import (
    Inputs,
    Options,
    chunk_decay,
    chunk_masks,
    invert_unit_lower,
    load_normalized,
    scan,
    set_slots,
    transition,
)
from llamafactory_ascend.kernels.gated_delta_rule.layout import Layout


class Saved(NamedTuple):
    """What backward cannot cheaply rebuild: (I + L)^-1 [N, C, C] and the states [chunks + 1, B * H, K, V].

    Slot c of the states is what chunk c starts from; the last slot belongs to no chunk.
    """

    inverse: Tensor
    states: Tensor


def forward_block(inputs: Inputs, layout: Layout, options: Options) -> tuple[Tensor, Tensor, Saved]:
    """Return output [N, C, V], final states [sequences of a row, B * H, K, V] and what backward needs."""
    dtype = options.dtype
    query, _ = load_normalized(inputs.query, layout, options, inputs.group, options.scale)
    key, _ = load_normalized(inputs.key, layout, options, inputs.group, 1.0)
    beta = layout.split(inputs.beta, dtype).unsqueeze(2)
    masks = chunk_masks(layout.chunk_size, key.device, dtype)
    decay = chunk_decay(layout.split(inputs.g, dtype), masks)

    key_t = key.transpose(1, 2)
    inverse = invert_unit_lower(torch.bmm(key, key_t).mul_(decay.pairwise).mul_(beta), masks)
    attention = torch.bmm(query, key_t).mul_(decay.pairwise)
    u = torch.bmm(inverse, layout.split(inputs.value, dtype).mul_(beta))
    w = torch.bmm(inverse, key * (beta * decay.from_start))
    decayed_key = key.mul_(decay.to_end)
    query.mul_(decay.from_start)
    matrices = transition(decayed_key, w, decay.total)
    del decay

    states, final = _run_states(inputs, layout, decayed_key, u, matrices)
    del decayed_key, key, key_t, matrices
    entering = states[:-1].flatten(0, 1)
    corrected = u.baddbmm_(w, entering, alpha=-1)
    del w
    output = torch.bmm(attention, corrected).baddbmm_(query, entering)
    return output, final, Saved(inverse, states)


def _run_states(
    inputs: Inputs, layout: Layout, decayed_key: Tensor, u: Tensor, matrices: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the states [chunks + 1, B * H, K, V] that chunks start from, and each sequence's final one."""
    chunks = layout.chunks
    blocks, key_dim, value_dim = u.shape[0] // chunks, matrices.shape[2], u.shape[2]
    initial = None
    if inputs.initial_state is not None:
        initial = layout.split_states(inputs.initial_state, u.dtype)
    states = u.new_empty(chunks + 1, blocks, key_dim, value_dim)
    torch.bmm(decayed_key.transpose(1, 2), u, out=states[1:].view(-1, key_dim, value_dim))

    slots = states.unbind(0)
    sources: list[Tensor | None] = list(slots[:-1])
    for number, start in enumerate(layout.starts):  # a packed sequence never sees its neighbour's state
        sources[start] = None if initial is None else initial[number]
    scan(slots[1:], matrices.view(chunks, blocks, key_dim, key_dim).unbind(0), sources)

    final = torch.stack([slots[end + 1] for end in layout.ends])
    set_slots(states, layout.starts, initial)
    return states, final


def forward(
    inputs: Inputs, layout: Layout, options: Options, head_block: int
) -> tuple[Tensor, Tensor, list[Saved]]:
    """Return the padded output [B, T, H, V], final states [sequences, H, K, V] and a `Saved` per block."""
    heads = inputs.value.shape[2]
    output = inputs.query.new_empty(inputs.value.shape)
    finals, saved = [], []
    for start in range(0, heads, head_block):
        stop = min(start + head_block, heads)
        chunks, final, kept = forward_block(inputs.heads(start, stop), layout, options)
        layout.join(chunks, output[:, :, start:stop])
        finals.append(layout.join_states(final))
        saved.append(kept)
        del chunks, kept
    return output, torch.cat(finals, 1) if len(finals) > 1 else finals[0], saved
