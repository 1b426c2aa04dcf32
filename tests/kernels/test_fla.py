"""Calls that are split into ranges of heads give what one call gives."""

from typing import Any

import pytest
import torch

from llamafactory_ascend.kernels import grids
from llamafactory_ascend.kernels.fla import in_head_ranges
from llamafactory_ascend.kernels.gated_delta_rule import chunk_gated_delta_rule
from tests.kernels.reference import error, make_case

OPTIONS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize("cu_seqlens", [None, [0, 50, 130, 200]])
def test_split(cu_seqlens: list[int] | None) -> None:
    """Six value heads, two to a key head, in three launches."""
    case = make_case(batch=1, key_heads=3, value_heads=6)
    tensors = [x.requires_grad_() for x in case[:5]]
    states = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    state = torch.randn(states, 6, 64, 32, generator=torch.Generator().manual_seed(5))
    lengths = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[2].shape[2])
        return chunk_gated_delta_rule(*args, **kwargs)

    padded = 200 + (0 if cu_seqlens is None else 3 * (grids.CHUNK - 1))
    limit = 2 * -(-padded // grids.CHUNK)  # one group of two heads at a time
    parts = in_head_ranges(counted, *tensors, initial_state=state, cu_seqlens=lengths, limit=limit, **OPTIONS)
    whole = chunk_gated_delta_rule(*tensors, initial_state=state, cu_seqlens=lengths, **OPTIONS)
    assert calls == [2, 2, 2]
    assert whole[1] is not None and parts[1] is not None
    assert error(parts[0], whole[0]) < 1e-6 and error(parts[1], whole[1]) < 1e-6
    gradients = [torch.autograd.grad(output, tensors, case.d_output) for output in (parts[0], whole[0])]
    assert all(error(one, other) < 1e-6 for one, other in zip(*gradients, strict=True))


def test_one_call_where_it_fits() -> None:
    case = make_case(batch=2, key_heads=3, value_heads=6)
    options = {**OPTIONS, "output_final_state": False}
    output, state = in_head_ranges(
        chunk_gated_delta_rule, *case[:5], initial_state=None, cu_seqlens=None, **options
    )
    assert state is None and torch.equal(output, chunk_gated_delta_rule(*case[:5], **options)[0])
