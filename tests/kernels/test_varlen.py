"""Where packed samples begin, from position ids and from the host's block-diagonal mask."""

import pytest
import torch
from llamafactory.data.collator import prepare_4d_attention_mask

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.kernels import varlen

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 4, 0, 1, 2]])
INDICES = torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0], [1, 1, 1, 1, 1, 2, 2, 2]])
STARTS = [0, 3, 5, 8, 13]


def test_positions_and_mask_agree() -> None:
    """The trailing padding, all zeros in both, is one sequence."""
    found = varlen.of(POSITIONS, None, 2, 8)
    mask = varlen.of(None, prepare_4d_attention_mask(INDICES, torch.float32), 2, 8)
    boolean = varlen.of(None, prepare_4d_attention_mask(INDICES, torch.float32) == 0, 2, 8)
    for sequences in (found, mask, boolean):
        assert sequences is not None
        assert sequences.cu_seqlens.tolist() == [*STARTS, 16]
        assert sequences.index.flatten().tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]


def test_positions_that_run_through() -> None:
    """Transformers makes them up where none are given; the mask still tells samples apart."""
    mask = prepare_4d_attention_mask(INDICES, torch.float32)
    found = varlen.of(torch.arange(8)[None], mask, 2, 8)
    assert found is not None and found.cu_seqlens.tolist() == [*STARTS, 16]


def test_positions_that_are_too_few() -> None:
    with pytest.raises(AscendError, match="16 tokens a row, but 8 position ids"):
        varlen.of(POSITIONS, None, 2, 16)


def test_axes_of_multimodal_positions() -> None:
    """The first axis tells samples apart; the others follow images."""
    axes = torch.stack([POSITIONS, POSITIONS * 0])
    found = varlen.of(axes, None, 2, 8)
    assert found is not None and found.cu_seqlens.tolist() == [*STARTS, 16]


def test_nothing_packed() -> None:
    assert varlen.of(torch.arange(8)[None].expand(2, 8), None, 2, 8) is None
    assert varlen.of(None, torch.ones(2, 8), 2, 8) is None
    assert varlen.of(None, None, 2, 8) is None


def test_remembered_while_unchanged() -> None:
    positions = POSITIONS.clone()
    first = varlen.of(positions, None, 2, 8)
    assert varlen.of(positions, None, 2, 8) is first
    positions[0, 4] = 0  # a run of zeros from token 3 on, which is one sequence
    changed = varlen.of(positions, None, 2, 8)
    assert changed is not None and changed.cu_seqlens.tolist() == [0, 3, 8, 13, 16]


def test_one_position_row_for_the_batch() -> None:
    found = varlen.of(torch.tensor([[0, 1, 0, 1]]), None, 2, 4)
    assert found is not None and found.cu_seqlens.tolist() == [0, 2, 4, 6, 8]


def test_from_lengths_and_from_numbers() -> None:
    lengths = varlen.of_cu_seqlens(torch.tensor([0, 3, 5]), 5)
    numbers = varlen.of_seq_idx(torch.tensor([[0, 0, 0, 1, 1]], dtype=torch.int32))
    assert numbers is not None
    assert lengths.index.flatten().tolist() == numbers.index.flatten().tolist() == [0, 1, 2, 0, 1]
    assert numbers.cu_seqlens.tolist() == [0, 3, 5]


def test_using_restores() -> None:
    sequences = varlen.of_cu_seqlens(torch.tensor([0, 2]), 2)
    with varlen.using(sequences):
        assert varlen.current() is sequences
        with varlen.using(None):
            assert varlen.current() is None
        assert varlen.current() is sequences
    assert varlen.current() is None
