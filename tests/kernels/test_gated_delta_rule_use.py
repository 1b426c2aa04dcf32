"""Using the gated delta rule: Transformers' interface, autocast, checkpointing, devices, memory, errors."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.kernels.gated_delta_rule import budget, chunk_gated_delta_rule
from tests.kernels.reference import error, make_case

torch.set_num_threads(1)


class Launches(TorchDispatchMode):
    """Counts operators that are not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def make_inputs(dtype: torch.dtype = torch.float32, **sizes: Any) -> list[Tensor]:
    query, key, value, g, beta, _ = make_case("model", **sizes)
    return [*(x.to(dtype) for x in (query, key, value)), g, beta.to(dtype)]


def run(inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """Return the output and the gradients of its sum of squares."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output, _ = chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, **options)
    output.float().square().sum().backward()
    return [output.detach(), *(x.grad for x in leaves)]


def test_takes_the_arguments_of_transformers_in_the_same_places() -> None:
    theirs = inspect.signature(torch_chunk_gated_delta_rule).parameters
    ours = inspect.signature(chunk_gated_delta_rule).parameters
    positional = [name for name, p in theirs.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    assert [ours[name].default for name in positional] == [theirs[name].default for name in positional]


def test_returns_what_transformers_returns() -> None:
    inputs = make_inputs(torch.bfloat16, tokens=100)
    theirs = torch_chunk_gated_delta_rule(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    ours = chunk_gated_delta_rule(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert error(a, b) < 1e-2
    assert chunk_gated_delta_rule(*inputs)[1] is None


def test_ignores_what_transformers_passes_to_attention_functions() -> None:
    inputs = make_inputs(tokens=70)
    plain, _ = chunk_gated_delta_rule(*inputs)
    output, _ = chunk_gated_delta_rule(*inputs, cu_seq_lens_k=None, max_length_q=70, use_gate_in_kernel=False)
    assert torch.equal(output, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_outside(dtype: torch.dtype) -> None:
    inputs = make_inputs(tokens=100)
    plain = run(inputs)
    with torch.autocast("cpu", dtype):
        cast = run(inputs)  # forward and backward
    assert all(torch.equal(a, b) for a, b in zip(cast, plain, strict=True))


def test_two_runs_are_equal_to_the_bit() -> None:
    inputs = make_inputs(torch.bfloat16, key_heads=1)
    assert all(torch.equal(a, b) for a, b in zip(run(inputs), run(inputs), strict=True))


def test_backward_twice_through_one_graph() -> None:
    inputs = [x.requires_grad_() for x in make_inputs(tokens=100)]
    output, _ = chunk_gated_delta_rule(*inputs)
    first, second = (torch.autograd.grad(output.sum(), inputs, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_strides_of_the_inputs_do_not_matter() -> None:
    inputs = make_inputs(tokens=100)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    assert all(torch.equal(a, b) for a, b in zip(run(strided), run(inputs), strict=True))


def test_expanded_inputs_and_gradients() -> None:
    query, key, value, g, beta = make_inputs(tokens=64)
    leaf = key[:, :1].clone().requires_grad_()
    output, _ = chunk_gated_delta_rule(
        query, leaf.expand_as(key), value, g, beta, use_qk_l2norm_in_kernel=True
    )
    output.sum().backward()  # its gradient is one number, expanded
    copied = key[:, :1].expand_as(key).clone().requires_grad_()
    again, _ = chunk_gated_delta_rule(query, copied, value, g, beta, use_qk_l2norm_in_kernel=True)
    again.backward(torch.ones_like(again))
    assert error(leaf.grad, copied.grad.sum(1, keepdim=True)) < 1e-5


def test_nothing_is_saved_without_gradients() -> None:
    inputs = make_inputs(tokens=100)
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output, _ = chunk_gated_delta_rule(*inputs)
        with torch.no_grad():
            chunk_gated_delta_rule(*(x.requires_grad_() for x in inputs))
        assert saved == [] and output.grad_fn is None
        chunk_gated_delta_rule(*inputs)
    # The five inputs, (I + L)^-1 and the states: batch 2, 3 heads, 2 chunks of 64 tokens, K 64, V 32.
    assert sum(saved) == sum(x.numel() for x in inputs) + 2 * 3 * (2 * 64 * 64 + 3 * 64 * 32)


def test_inside_checkpointing_without_reentrance() -> None:
    inputs = make_inputs(tokens=100)
    bounds = torch.tensor([0, 30, 100])
    calls = []

    def layer(*x: Tensor) -> Tensor:
        calls.append(1)
        return chunk_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)[0]

    inputs = [x[:1] for x in inputs]
    plain = run(inputs, cu_seqlens=bounds)
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = checkpoint(layer, *leaves, use_reentrant=False)
    output.square().sum().backward()
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip([output, *(x.grad for x in leaves)], plain, strict=True))


def test_second_derivatives_are_refused() -> None:
    inputs = [x.requires_grad_() for x in make_inputs(tokens=10)]
    output, _ = chunk_gated_delta_rule(*inputs)
    (gradient,) = torch.autograd.grad(output.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_inference_mode_before_training() -> None:
    # Constants that are kept must not be inference tensors, and cu_seqlens made there has no version.
    inputs = make_inputs(torch.float64, tokens=40, batch=1, key_dim=8)
    with torch.inference_mode():
        first, _ = chunk_gated_delta_rule(
            *inputs, 8, use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, 40])
        )
    assert error(first, run(inputs, chunk_size=8)[0]) < 1e-14


def test_launches_grow_by_two_a_chunk() -> None:
    counts = {}
    for tokens in (1024, 2048):
        inputs = [
            x.to("meta") for x in make_inputs(torch.bfloat16, tokens=tokens, batch=1, key_dim=8, value_dim=8)
        ]
        run(inputs)
        with Launches() as launches:
            run(inputs)
        counts[tokens] = launches.count
    assert counts[2048] - counts[1024] == 2 * 16
    assert counts[1024] < 230


def test_simulated_npu_agrees_and_budget_predicts_its_peak() -> None:
    inputs = make_inputs(
        torch.bfloat16, batch=1, tokens=1024, key_heads=2, value_heads=4, key_dim=128, value_dim=128
    )
    expected = run(inputs)
    on_device = [x.to("npu") for x in inputs]
    per_head = budget.working_bytes_per_head(16, 64, 128, 128, 4)
    peaks = {}
    for head_block in (4, 2):
        torch.npu.reset_peak_memory_stats()
        before = torch.npu.memory_allocated()
        actual = run(on_device, head_block=head_block)
        peaks[head_block] = torch.npu.max_memory_allocated() - before
        assert all(error(a.cpu(), b) < 1e-6 for a, b in zip(actual, expected, strict=True))
        del actual
    # Output and its gradients, in bfloat16 and float32, lie beside the working set.
    beside = 3 * inputs[2].numel() * 4
    assert 4 * per_head <= peaks[4] <= 4 * per_head + beside
    assert peaks[2] < 0.75 * peaks[4]


def test_packed_row_on_the_simulated_npu_under_autocast() -> None:
    inputs = make_inputs(torch.bfloat16, batch=1, tokens=150, key_heads=1)
    bounds = torch.tensor([0, 70, 150], dtype=torch.int32)
    expected = run(inputs, cu_seqlens=bounds)
    with torch.autocast("npu", torch.bfloat16):
        actual = run([x.to("npu") for x in inputs], cu_seqlens=bounds.to("npu"))
    assert {x.device.type for x in actual} == {"npu"}
    assert all(error(a.cpu(), b) < 1e-6 for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": (2, 20, 2, 8)}, "query [2, 20, 1, 8], key [2, 20, 2, 8] and value [2, 20, 3, 4] differ"),
        ({"query": (2, 20, 2, 8), "key": (2, 20, 2, 8)}, "3 value heads cannot share 2 key heads"),
        ({"g": (2, 3, 20)}, "g [2, 3, 20] and beta [2, 20, 3] do not fit value [2, 20, 3, 4]"),
        ({"initial_state": (1, 3, 8, 4)}, "initial_state is [1, 3, 8, 4] where [2, 3, 8, 4] is needed"),
        ({"cu_seqlens": [0, 20]}, "cu_seqlens with a batch of 2 rows"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"head_block": -1}, "head_block is -1"),
        ({"use_gate_in_kernel": True}, "use_gate_in_kernel is not supported"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    shapes = {
        "query": (2, 20, 1, 8),
        "key": (2, 20, 1, 8),
        "value": (2, 20, 3, 4),
        "g": (2, 20, 3),
        "beta": (2, 20, 3),
    }
    arguments: dict[str, Any] = {**shapes, **change}
    for name, value in arguments.items():
        if isinstance(value, tuple):
            arguments[name] = torch.zeros(value)
        elif isinstance(value, list):
            arguments[name] = torch.tensor(value)
    with pytest.raises(AscendError) as caught:
        chunk_gated_delta_rule(**arguments)
    assert message in str(caught.value) and "next: " in str(caught.value)


def test_cu_seqlens_must_cover_the_row() -> None:
    inputs = make_inputs(batch=1, tokens=20)
    for bounds in ([0, 19], [1, 20], [0, 15, 10, 20], [0]):
        with pytest.raises(AscendError, match="does not describe a row of 20 tokens"):
            chunk_gated_delta_rule(*inputs, cu_seqlens=torch.tensor(bounds))
