"""The gated delta rule against the token-by-token float64 reference, values and gradients; and gradcheck."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llamafactory_ascend.kernels.gated_delta_rule import chunk_gated_delta_rule
from tests.kernels.reference import Case, error, make_case, recurrent_gated_delta_rule

torch.set_num_threads(1)


def cast(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return the inputs as a model would hold them (g stays float32 unless float64 is asked) and d_output."""
    query, key, value, g, beta, d_output = case
    g = g.double() if dtype == torch.float64 else g
    return [query.to(dtype), key.to(dtype), value.to(dtype), g, beta.to(dtype)], d_output.to(dtype)


def differentiate(
    rule: Callable[..., Any], inputs: list[Tensor], d_output: Tensor, **options: Any
) -> list[Tensor]:
    """Return the output and the gradient of every input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = rule(*leaves, **options)[0]
    output.backward(d_output.to(output.dtype))
    return [output.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def errors(
    inputs: list[Tensor], d_output: Tensor, ours: dict[str, Any], reference: dict[str, Any]
) -> list[float]:
    """Return the errors of output and gradients; the reference sees the same rounded inputs, in float64."""
    actual = differentiate(chunk_gated_delta_rule, inputs, d_output, use_qk_l2norm_in_kernel=True, **ours)
    exact = [x.double() for x in inputs]
    expected = differentiate(recurrent_gated_delta_rule, exact, d_output.double(), **reference)
    assert [x.dtype for x in actual[1:]] == [x.dtype for x in inputs]
    assert all(x.isfinite().all() for x in actual)
    return [error(a, b) for a, b in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("kind", ["model", "slow", "strong"])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.float16, 5e-4), (torch.bfloat16, 3e-3)],
)
def test_output_and_gradients_match_the_recurrence(kind: str, dtype: torch.dtype, bound: float) -> None:
    inputs, d_output = cast(make_case(kind), dtype)
    assert max(errors(inputs, d_output, {}, {})) < bound


def test_near_identical_keys_stay_exact_in_bfloat16() -> None:
    # Powers of the triangle reach 1e9 here: an inverse by Neumann doubling is off by more than its own size.
    inputs, d_output = cast(make_case("same_key"), torch.bfloat16)
    assert max(errors(inputs, d_output, {}, {})) < 1e-2


def test_strong_decay_keeps_the_digits_of_the_weak_decays_after_it() -> None:
    # As a difference of cumulative sums, exp(-0.01) beside a token of exp(-30000) loses all but three digits.
    case = make_case("slow")
    g = case.g.clone()
    g[:, ::16] = -30000.0
    inputs, d_output = cast(case._replace(g=g), torch.float32)
    assert max(errors(inputs, d_output, {}, {})) < 2e-6


def test_decay_of_minus_infinity_forgets_everything() -> None:
    case = make_case("model", tokens=100)
    g = case.g.clone()
    g[:, 70] = float("-inf")
    inputs, _ = cast(case._replace(g=g), torch.float32)
    output, gradient, *others = differentiate(
        chunk_gated_delta_rule, inputs, case.d_output, use_qk_l2norm_in_kernel=True
    )
    tail = [x[:, 70:] for x in inputs]
    expected, _ = recurrent_gated_delta_rule(*tail)
    assert error(output[:, 70:], expected) < 2e-6
    assert all(x.isfinite().all() for x in (gradient, *others))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("chunk_size", [1, 24, 64])
def test_any_length_and_chunk_size(tokens: int, chunk_size: int) -> None:
    inputs, d_output = cast(make_case("model", tokens=tokens, key_dim=16, value_dim=8), torch.float64)
    assert max(errors(inputs, d_output, {"chunk_size": chunk_size}, {})) < 1e-12


def test_grouped_heads_share_consecutive_value_heads() -> None:
    inputs, d_output = cast(make_case("model", key_heads=2, value_heads=6), torch.float32)
    assert max(errors(inputs, d_output, {}, {})) < 2e-6


def test_packed_sequences_do_not_see_each_other() -> None:
    bounds = [0, 40, 41, 41, 150, 278]  # shorter than a chunk, one token, empty, ragged, two whole chunks
    case = make_case("slow", batch=1, tokens=278, key_heads=1, value_heads=2)
    inputs, d_output = cast(case, torch.float32)
    ours = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    assert max(errors(inputs, d_output, ours, {"cu_seqlens": bounds})) < 2e-6
    assert max(errors(inputs, d_output, {}, {"cu_seqlens": bounds})) > 0.1  # the leak that it prevents


def test_changed_cu_seqlens_are_read_again() -> None:
    inputs, _ = cast(make_case("slow", batch=1, tokens=100), torch.float64)
    bounds = torch.tensor([0, 40, 100])
    for middle in (40, 60):
        bounds[1] = middle
        output, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True)
        expected, _ = recurrent_gated_delta_rule(*inputs, cu_seqlens=[0, middle, 100])
        assert error(output, expected) < 1e-12


@pytest.mark.parametrize("bounds", [None, [0, 30, 30, 100]])
def test_states_go_in_and_out_with_gradients(bounds: list[int] | None) -> None:
    case = make_case("slow", batch=2 if bounds is None else 1, tokens=100, key_heads=1, value_heads=2)
    inputs, d_output = cast(case, torch.float64)
    generator = torch.Generator().manual_seed(1)
    state, d_final = torch.randn(2, 2 if bounds is None else 3, 2, 64, 32, generator=generator).double()
    packing = [{}, {}] if bounds is None else [{"cu_seqlens": torch.tensor(bounds)}, {"cu_seqlens": bounds}]
    results = []
    for rule, options in (
        (chunk_gated_delta_rule, {"output_final_state": True, "use_qk_l2norm_in_kernel": True, **packing[0]}),
        (recurrent_gated_delta_rule, packing[1]),
    ):
        leaves = [x.clone().requires_grad_() for x in (*inputs, state)]
        output, final = rule(*leaves[:5], initial_state=leaves[5], **options)
        torch.autograd.backward([output, final], [d_output, d_final])
        results.append([output, final, *(x.grad for x in leaves)])
    assert max(error(a, b) for a, b in zip(*results, strict=True)) < 1e-12


def test_only_the_final_state_is_differentiated() -> None:
    inputs, _ = cast(make_case("slow", tokens=100), torch.float64)

    def final_state(rule: Callable[..., Any], **options: Any) -> list[Tensor]:
        return differentiate(
            lambda *x: rule(*x, **options)[::-1], inputs, torch.ones(()).expand(2, 3, 64, 32)
        )

    actual = final_state(chunk_gated_delta_rule, output_final_state=True, use_qk_l2norm_in_kernel=True)
    expected = final_state(recurrent_gated_delta_rule)
    assert error(actual[1], expected[1]) == 0.0  # the query does not reach the state
    assert max(error(a, b) for a, b in zip(actual[2:], expected[2:], strict=True)) < 1e-12


def test_chunked_prefill_continues_where_it_stopped() -> None:
    inputs, _ = cast(make_case("slow", tokens=150), torch.float64)
    whole, last = chunk_gated_delta_rule(*inputs, output_final_state=True)
    first, state = chunk_gated_delta_rule(*(x[:, :70] for x in inputs), output_final_state=True)
    second, final = chunk_gated_delta_rule(
        *(x[:, 70:] for x in inputs), initial_state=state, output_final_state=True
    )
    assert error(torch.cat([first, second], 1), whole) < 1e-13
    assert error(final, last) < 1e-13


def test_scale_and_unnormalised_keys() -> None:
    query, key, value, g, beta = cast(make_case("model", tokens=80, key_dim=16), torch.float64)[0]
    inputs, d_output = [query, 0.2 * key, value, g, beta], torch.ones_like(value)
    actual = differentiate(chunk_gated_delta_rule, inputs, d_output, scale=0.3)
    expected = differentiate(recurrent_gated_delta_rule, inputs, d_output, scale=0.3, normalize=False)
    assert max(error(a, b) for a, b in zip(actual, expected, strict=True)) < 1e-12


def test_fully_padded_rows_are_finite_and_zero() -> None:
    # Transformers zeroes padded positions before the layer, so that query, key and value are exactly zero.
    case = make_case("model", tokens=90)
    zeroed = [x.clone() for x in case[:3]]
    for x in zeroed:
        x[1] = 0
        x[0, 60:] = 0
    inputs, d_output = cast(Case(*zeroed, *case[3:]), torch.float32)
    assert max(errors(inputs, d_output, {}, {})) < 2e-6
    output, *gradients = differentiate(chunk_gated_delta_rule, inputs, d_output, use_qk_l2norm_in_kernel=True)
    assert output[1].abs().max() == 0
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("head_block", [1, 2, 4, 6])
def test_blocks_of_heads_change_nothing(head_block: int) -> None:
    inputs, d_output = cast(make_case("model", tokens=100, key_heads=3, value_heads=6), torch.float64)
    state = torch.randn(2, 6, 64, 32, generator=torch.Generator().manual_seed(2)).double()

    def rule(*x: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        return chunk_gated_delta_rule(*x[:5], initial_state=x[5], use_qk_l2norm_in_kernel=True, **options)

    whole = differentiate(rule, [*inputs, state], d_output, head_block=6)
    blocks = differentiate(rule, [*inputs, state], d_output, head_block=head_block)
    assert max(error(a, b) for a, b in zip(blocks, whole, strict=True)) < 1e-14


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 3, 10]])
def test_gradcheck(bounds: list[int] | None, normalize: bool) -> None:
    case = make_case("slow", 1 if bounds else 2, 10, key_heads=2, value_heads=4, key_dim=3, value_dim=2)
    inputs, _ = cast(case, torch.float64)
    inputs[3] = inputs[3] * 300  # decays between 1 and exp(-0.3), so that g matters
    state = torch.randn(2, 4, 3, 2, generator=torch.Generator().manual_seed(3)).double()
    cu_seqlens = None if bounds is None else torch.tensor(bounds)

    def rule(*x: Tensor) -> tuple[Tensor, Tensor | None]:
        return chunk_gated_delta_rule(*x[:5], 4, x[5], True, normalize, cu_seqlens=cu_seqlens, head_block=2)

    assert torch.autograd.gradcheck(rule, [x.requires_grad_() for x in (*inputs, state)])
