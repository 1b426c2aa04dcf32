"""Packed samples: where each begins, and how the layers of a hybrid learn of it.

The host packs with position ids that start anew at every sample (and, without flash attention, with a
block-diagonal mask). Transformers gives them to the decoder layer, which keeps them from its linear
attention; so that layer is told before it calls it. A layer that backward runs again gets the very tensors
of its first run, so recomputation sees the same boundaries.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from llamafactory_ascend.errors import AscendError


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a batch whose rows are laid end to end.

    Attributes:
        cu_seqlens: [sequences + 1] cumulative lengths, int64, from 0 to rows * tokens.
        index: [1, rows * tokens, 1] place of each token in its sequence, int64.
    """

    cu_seqlens: Tensor
    index: Tensor


class _Local(threading.local):
    sequences: Sequences | None = None


_local = _Local()
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def current() -> Sequences | None:
    """Return the sequences of the batch that this thread works on, None where its rows are whole samples."""
    return _local.sequences


@contextlib.contextmanager
def using(sequences: Sequences | None) -> Iterator[None]:
    """Make `sequences` the current ones of this thread."""
    before = _local.sequences
    _local.sequences = sequences
    try:
        yield
    finally:
        _local.sequences = before


def of(
    position_ids: Tensor | None, attention_mask: Tensor | None, rows: int, tokens: int
) -> Sequences | None:
    """Return the sequences of a batch: those its position ids tell apart, or else those its mask does.

    Args:
        position_ids: [rows, tokens] or [axes, rows, tokens] (the first axis counts).
        attention_mask: [rows, 1, tokens, tokens], additive or bool; of another shape it tells nothing.
        rows, tokens: the shape of the batch.

    Returns:
        None where neither tells sequences apart, or each row is one sequence.

    Raises:
        AscendError: there are more or fewer position ids than tokens.
    """
    if rows * tokens == 0:
        return None
    if position_ids is not None and position_ids.shape[-1] != tokens:
        raise AscendError(
            f"packing: the batch has {tokens} tokens a row, but {position_ids.shape[-1]} position ids",
            "set `packing: false` and `neat_packing: false`",
        )
    found = None
    if position_ids is not None:
        found = _remembered(position_ids, starts_of_positions, rows, tokens)
    if found is None and attention_mask is not None and attention_mask.dim() == 4:
        found = _remembered(attention_mask, starts_of_mask, rows, tokens)
    return found


def _remembered(source: Tensor, find: Callable[[Tensor], Tensor], rows: int, tokens: int) -> Sequences | None:
    """Return the sequences that `find` sees, remembered for as long as the tensor lives unchanged.

    Finding them makes the host wait for the device; all layers of a step, and their recomputation, pass the
    same tensor, so that the wait happens once.
    """
    if source.is_inference():  # it has no version by which a change could be seen
        return _sequences(find(source).expand(rows, tokens))
    key = (source._version, rows, tokens)
    known = _known.get(source)  # type: ignore[no-untyped-call]
    if known is None or known[0] != key:
        known = _known[source] = (key, _sequences(find(source).expand(rows, tokens)))
    found: Sequences | None = known[1]
    return found


def starts_of_positions(position_ids: Tensor) -> Tensor:
    """Return [rows, tokens] bool: the tokens where a position of 0 follows another one.

    Padding has zeros only, so that a run of zeros is one sequence.
    """
    positions = position_ids[0] if position_ids.dim() == 3 else position_ids
    starts = torch.zeros_like(positions, dtype=torch.bool)
    starts[:, 0] = True
    starts[:, 1:] = (positions[:, 1:] == 0) & (positions[:, :-1] != 0)
    return starts


def starts_of_mask(attention_mask: Tensor) -> Tensor:
    """Return [rows, tokens] bool: tokens that may not attend to the one before; padding is one sequence."""
    allowed = attention_mask[:, 0] if attention_mask.dtype == torch.bool else attention_mask[:, 0] == 0
    before, itself = allowed.diagonal(-1, 1, 2), allowed.diagonal(0, 1, 2)
    starts = torch.ones_like(itself)
    starts[:, 1:] = ~before & (itself[:, 1:] | itself[:, :-1])
    return starts


def of_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> Sequences:
    """Return the sequences of one row of `tokens` tokens whose cumulative lengths the caller knows."""
    with torch.no_grad():
        place = torch.arange(tokens, device=cu_seqlens.device)
        begun = cu_seqlens[torch.searchsorted(cu_seqlens, place, right=True) - 1]
        return Sequences(cu_seqlens, (place - begun).view(1, -1, 1))


def of_seq_idx(seq_idx: Tensor) -> Sequences | None:
    """Return the sequences of [rows, tokens] numbers, equal within a sequence."""
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return _sequences(starts)


def _sequences(starts: Tensor) -> Sequences | None:
    rows, tokens = starts.shape
    with torch.no_grad():
        flat = starts.reshape(-1)
        first = flat.nonzero().squeeze(1)
        if first.numel() == rows:
            return None  # a sequence a row: nothing is packed
        end = first.new_tensor([rows * tokens])
        place = torch.arange(rows * tokens, device=starts.device)
        begun = torch.where(flat, place, torch.zeros_like(place)).cummax(0).values
        return Sequences(torch.cat([first, end]), (place - begun).view(1, -1, 1))
