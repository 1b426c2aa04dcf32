"""The parts of the gated delta rule: head blocks from a budget, the triangular inverse, layouts."""

import pytest
import torch

from llamafactory_ascend.kernels.gated_delta_rule.budget import (
    DEFAULT_BUDGET,
    choose_head_block,
    working_bytes_per_head,
)
from llamafactory_ascend.kernels.gated_delta_rule.chunk import chunk_masks, invert_unit_lower
from llamafactory_ascend.kernels.gated_delta_rule.layout import packed, rows


@pytest.mark.parametrize(
    ("heads", "group", "fitting", "expected"),
    [
        (48, 3, 48, 48),  # all at once
        (48, 3, 40, 24),  # two equal blocks, not 39 and 9
        (48, 3, 16, 12),  # 15 would fit, but four blocks are needed either way
        (48, 3, 2, 3),  # never less than one group
        (48, 1, 0, 1),
        (7, 1, 3, 3),  # 3, 3, 1: as few blocks as fit
        (8, 8, 100, 8),
    ],
)
def test_head_block_fits_the_budget_in_few_equal_blocks(
    heads: int, group: int, fitting: int, expected: int
) -> None:
    assert choose_head_block(heads, group, bytes_per_head=1000, budget=fitting * 1000 + 999) == expected


def test_the_27b_layer_is_one_block_at_4096_tokens_and_eight_at_32768() -> None:
    assert 48 * working_bytes_per_head(64, 64, 128, 128, 4) == 1_258_291_200 < DEFAULT_BUDGET
    assert choose_head_block(48, 3, working_bytes_per_head(64, 64, 128, 128, 4)) == 48
    assert choose_head_block(48, 3, working_bytes_per_head(512, 64, 128, 128, 4)) == 6


@pytest.mark.parametrize("size", [1, 2, 3, 24, 64])
def test_inverse_of_unit_lower_triangles(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(5, size, size, generator=generator, dtype=torch.float64)
    eye = torch.eye(size, dtype=torch.float64)
    inverse = invert_unit_lower(full, chunk_masks(size, full.device, full.dtype))  # only what is below counts
    residual = inverse @ (eye + full.tril(-1)) - eye
    assert residual.norm() < 1e-12 * inverse.norm() * full.norm()


def test_inverse_of_all_ones_is_exact_where_neumann_doubling_is_not() -> None:
    lower = torch.full((1, 64, 64), 0.999).tril(-1)
    eye = torch.eye(64)
    exact = (eye + lower).double().inverse()
    inverse = invert_unit_lower(lower, chunk_masks(64, lower.device, lower.dtype))
    doubling, power = eye - lower, lower @ lower
    while power.abs().max() > 0:
        doubling, power = doubling @ (eye + power), power @ power
    assert (inverse - exact).norm() / exact.norm() < 1e-6
    assert (doubling - exact).norm() / exact.norm() > 1e6


def test_rows_split_into_chunks_and_back() -> None:
    layout = rows(2, 10, 4)
    assert (layout.chunks, layout.starts, layout.ends) == (3, (0,), (2,))
    x = torch.arange(2 * 10 * 3 * 5.0).view(2, 10, 3, 5)
    padded = layout.pad(x)
    chunks = layout.split(padded, torch.float64, repeats=2)
    assert chunks.shape == (3 * 2 * 6, 4, 5) and chunks.dtype == torch.float64
    # Chunk 1 of row 1, second copy of head 2: (chunk * B + row) * heads + head.
    assert torch.equal(chunks[(1 * 2 + 1) * 6 + 2 * 2 + 1], x[1, 4:8, 2].double())
    target = torch.empty_like(padded)
    layout.join(chunks, target, repeats=2)
    assert torch.equal(layout.unpad(target), 2 * x)


def test_packed_sequences_start_at_chunks() -> None:
    layout = packed(torch.tensor([0, 5, 5, 13]), 13, 4, torch.device("cpu"))
    assert (layout.chunks, layout.starts, layout.ends) == (5, (0, 2, 3), (1, 2, 4))
    x = torch.arange(1, 14.0).view(1, 13, 1)
    padded = layout.pad(x)
    assert padded.flatten().tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 0, 0, 0, 0, 6, 7, 8, 9, 10, 11, 12, 13]
    assert torch.equal(layout.unpad(padded), x)
