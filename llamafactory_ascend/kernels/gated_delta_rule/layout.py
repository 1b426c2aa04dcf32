"""Where tokens, chunks and states of the sequences lie: from [B, T, H, D] to chunks and back.

Chunk layout is [chunks * B * H, C, D] with the chunk outermost, so that what the scan needs for one chunk
(all batch rows and heads) is contiguous.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from llamafactory_ascend.errors import AscendError


@dataclass(frozen=True, eq=False)
class Layout:
    """How one batch is cut into chunks.

    Attributes:
        batch: rows of the batch; 1 for packed sequences.
        tokens: tokens of a row before padding.
        chunk_size: tokens in a chunk (C).
        chunks: chunks of a row after padding.
        starts: first chunk of each sequence of a row, ascending.
        ends: last chunk of each sequence of a row.
        positions: for packed sequences the padded position of each token, on the device; otherwise None, and
            padding (if any) is at the end of the row.
    """

    batch: int
    tokens: int
    chunk_size: int
    chunks: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    positions: Tensor | None

    def pad(self, x: Tensor) -> Tensor:
        """Return [B, T, ...] with every sequence filled up with zeros to whole chunks.

        Zero g, beta and key leave the state as it is, so padding changes no result.
        """
        padded = self.chunks * self.chunk_size
        if self.positions is not None:
            return x.new_zeros(self.batch, padded, *x.shape[2:]).index_copy_(1, self.positions, x)
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, padded - self.tokens)) if padded > self.tokens else x

    def unpad(self, x: Tensor) -> Tensor:
        """Undo `pad`: return the [B, T, ...] of the real tokens."""
        if self.positions is not None:
            return x.index_select(1, self.positions)
        return x[:, : self.tokens].clone() if x.shape[1] > self.tokens else x

    def split(self, x: Tensor, dtype: torch.dtype, repeats: int = 1) -> Tensor:
        """Copy a padded [B, T, H, ...] into chunk layout [chunks * B * H * repeats, C, ...] of `dtype`.

        `repeats` gives every key head to that many consecutive value heads, in the same single copy.
        """
        x = (
            x.view(self.batch, self.chunks, self.chunk_size, *x.shape[2:])
            .transpose(0, 1)
            .movedim(3, 2)
            .unsqueeze(3)
        )
        x = x.expand(*x.shape[:3], repeats, *x.shape[4:])
        x = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
        return x.view(-1, *x.shape[4:])

    def join(self, x: Tensor, target: Tensor, repeats: int = 1) -> None:
        """Write chunk layout `x` into the padded [B, T, H, ...] `target`, summing the `repeats` of a head."""
        heads = target.shape[2]
        x = x.view(self.chunks, self.batch, heads, repeats, *x.shape[1:])
        x = x.sum(3) if repeats > 1 else x.squeeze(3)
        x = x.movedim(2, 3).transpose(0, 1)
        target.view(self.batch, self.chunks, self.chunk_size, *target.shape[2:]).copy_(x)

    def split_states(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return states [sequences, H, K, V] as [sequences of a row, B * H, K, V]."""
        return x.to(dtype).reshape(len(self.starts), -1, *x.shape[2:])

    def join_states(self, x: Tensor) -> Tensor:
        """Undo `split_states`."""
        return x.reshape(len(self.starts) * self.batch, -1, *x.shape[2:])


def rows(batch: int, tokens: int, chunk_size: int) -> Layout:
    """Return the layout of a batch in which each row is one sequence."""
    chunks = -(-tokens // chunk_size)
    return Layout(batch, tokens, chunk_size, chunks, (0,), (chunks - 1,), None)


def packed(cu_seqlens: Tensor, tokens: int, chunk_size: int, device: torch.device) -> Layout:
    """Return the layout of one row of packed sequences; an empty sequence gets one chunk of padding.

    Args:
        cu_seqlens: [sequences + 1] cumulative lengths, from 0 to `tokens`.
        tokens: tokens of the row.
        chunk_size: tokens in a chunk.
        device: where the packed tensors are.

    Raises:
        AscendError: `cu_seqlens` does not describe `tokens` tokens.
    """
    bounds = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or min(lengths) < 0:
        raise AscendError(
            f"gated delta rule: cu_seqlens {bounds} does not describe a row of {tokens} tokens",
            hint=f"pass cumulative lengths that start at 0, never fall and end at {tokens}",
        )
    starts, ends, positions, chunk = [], [], [], 0
    for length in lengths:
        starts.append(chunk)
        positions.append(torch.arange(length) + chunk * chunk_size)
        chunk += max(1, -(-length // chunk_size))
        ends.append(chunk - 1)
    return Layout(1, tokens, chunk_size, chunk, tuple(starts), tuple(ends), torch.cat(positions).to(device))


_PACKED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packed_once(cu_seqlens: Tensor, tokens: int, chunk_size: int, device: torch.device) -> Layout:
    """Return `packed`, remembered for as long as this very tensor lives unchanged.

    Reading the lengths makes the host wait for the device. All layers of a step, and their recomputation,
    pass the same tensor, so that the wait happens once a step and not at every layer.
    """
    if cu_seqlens.is_inference():  # it has no version by which a change could be seen
        return packed(cu_seqlens, tokens, chunk_size, device)
    key = (cu_seqlens._version, tokens, chunk_size, device)
    known = _PACKED.get(cu_seqlens)  # type: ignore[no-untyped-call]
    if known is None or known[0] != key:
        with torch.inference_mode(False):
            known = _PACKED[cu_seqlens] = (key, packed(cu_seqlens, tokens, chunk_size, device))
    layout: Layout = known[1]
    return layout
