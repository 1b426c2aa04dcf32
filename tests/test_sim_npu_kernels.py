"""The simulated NPU's own kernels and fused operators, against the CPU's or plain PyTorch."""

from collections.abc import Callable

import pytest
import torch
import torch_npu
from torch import Tensor


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def value_and_grads(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result and the gradient of each input, on the CPU, for a weighted sum of the result."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    (y * weights).sum().backward()
    return [y.detach().cpu(), *(t.grad.cpu() for t in leaves)]


# ---- histc
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32])
def test_histc_counts_tokens_per_expert(dtype: torch.dtype) -> None:
    experts = torch.randint(0, 8, (500,))
    counted = torch.histc(experts.to(dtype).npu(), bins=8, min=0, max=7)
    assert counted.dtype == dtype and counted.device.type == "npu"
    wanted = torch.bincount(experts, minlength=8)
    assert counted.tolist() == (wanted % 256 if dtype == torch.uint8 else wanted).tolist()


def test_histc_of_integers_ignores_what_is_outside_and_takes_any_range() -> None:
    x = torch.tensor([-5, 0, 1, 1, 9, 10, 11, 40], device="npu")
    assert torch.histc(x, bins=5, min=0, max=10).tolist() == [3, 0, 0, 0, 2]
    assert torch.histc(x, bins=3).tolist() == [5, 2, 1]  # from the smallest to the largest
    assert torch.histc(x[:0], bins=2, min=0, max=1).tolist() == [0, 0]


def test_histc_writes_into_out() -> None:
    out = torch.empty(0, dtype=torch.int64, device="npu")
    assert torch.histc(torch.tensor([0, 2, 2], device="npu"), bins=3, min=0, max=2, out=out) is out
    assert out.tolist() == [1, 0, 2]
    with pytest.raises(RuntimeError, match="expected out to be Long, not Float"):
        torch.histc(torch.tensor([1], device="npu"), bins=3, out=torch.empty(3, device="npu"))


def test_mixture_of_experts_model_trains_as_on_the_cpu() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    tokens = torch.arange(64).view(2, 32)
    losses, gates = [], []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(device)
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
        loss.backward()
        losses.append(loss.item())
        gates.append(model.model.layers[0].mlp.gate.weight.grad.cpu())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert gates[0].abs().max() > 0
    torch.testing.assert_close(gates[1], gates[0])


# ---- convolution and dropout
@pytest.mark.parametrize("cls", [torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d])
def test_convolution_matches_the_cpu(cls: type[torch.nn.Module]) -> None:
    dimensions = int(cls.__name__[4])
    on_cpu = cls(4, 6, 3, stride=2, padding=1, groups=2)
    on_npu = cls(4, 6, 3, stride=2, padding=1, groups=2).to("npu")
    on_npu.load_state_dict(on_cpu.state_dict())
    x = torch.randn(2, 4, *([8] * dimensions))
    torch.testing.assert_close(value_and_grads(on_npu, x.npu()), value_and_grads(on_cpu, x))
    torch.testing.assert_close(on_npu.weight.grad.cpu(), on_cpu.weight.grad)
    torch.testing.assert_close(on_npu.bias.grad.cpu(), on_cpu.bias.grad)


def test_transposed_convolution_matches_the_cpu() -> None:
    on_cpu = torch.nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False)
    on_npu = torch.nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False).to("npu")
    on_npu.load_state_dict(on_cpu.state_dict())
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(value_and_grads(on_npu, x.npu()), value_and_grads(on_cpu, x))


def test_dropout_scales_what_it_keeps() -> None:
    x = torch.ones(1000, device="npu", requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.25)
    y.sum().backward()
    assert set(y.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert 700 < (y != 0).sum().item() < 800
    assert torch.equal(x.grad, y)
    assert torch.equal(torch.nn.functional.dropout(x, 0.25, training=False), x)
    assert torch.nn.functional.dropout(x, 1.0).abs().sum().item() == 0


# ---- fused operators
def test_rms_norm() -> None:
    x, gamma = torch.randn(3, 5, 16, device="npu"), torch.randn(16, device="npu")
    got = value_and_grads(lambda x, g: torch_npu.npu_rms_norm(x, g, epsilon=1e-6)[0], x, gamma)
    wanted = value_and_grads(lambda x, g: torch.nn.functional.rms_norm(x, (16,), g, 1e-6), x, gamma)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu(dim: int) -> None:
    x = torch.randn(3, 6, 16, device="npu")

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim)
        return torch.nn.functional.silu(gate) * up

    got = value_and_grads(lambda x: torch_npu.npu_swiglu(x, dim=dim), x)
    torch.testing.assert_close(got, value_and_grads(plain, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(mode: str) -> None:
    x = torch.randn(2, 5, 16, device="npu")
    cos, sin = torch.randn(1, 5, 16, device="npu"), torch.randn(1, 5, 16, device="npu")

    def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if mode == "half":
            rotated = torch.cat([-x[..., 8:], x[..., :8]], -1)
        else:
            rotated = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
        return x * cos + rotated * sin

    got = value_and_grads(lambda *t: torch_npu.npu_rotary_mul(*t, rotary_mode=mode), x, cos, sin)
    torch.testing.assert_close(got, value_and_grads(plain, x, cos, sin), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="must be 'half' or 'interleave', not 'quarter'"):
        torch_npu.npu_rotary_mul(x, cos, sin, rotary_mode="quarter")


def test_fused_operators_charge_what_goes_in_and_out_alone() -> None:
    x = torch.randn(64, 512, device="npu", dtype=torch.bfloat16, requires_grad=True)
    before = torch.npu.memory_stats()["requested_bytes.all.current"]
    torch.npu.reset_peak_memory_stats()
    y = torch_npu.npu_swiglu(x)
    y.backward(torch.ones_like(y))
    # y and its gradient, and the gradient of x
    assert torch.npu.memory_stats()["requested_bytes.all.peak"] - before == (2 * y.numel() + x.numel()) * 2


def test_fused_operators_have_one_derivative() -> None:
    x = torch.randn(2, 8, device="npu", requires_grad=True)
    (gradient,) = torch.autograd.grad(torch_npu.npu_swiglu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_fused_operators_refuse_cpu_tensors() -> None:
    with pytest.raises(NotImplementedError, match=r"npu_rms_norm.*CPU"):
        torch_npu.npu_rms_norm(torch.ones(2, 4), torch.ones(4))
    with pytest.raises(RuntimeError, match=r"same device.*npu_rms_norm"):
        torch_npu.npu_rms_norm(torch.ones(2, 4, device="npu"), torch.ones(4))


# ---- attention
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "BNSD": lambda t: t,
    "BSND": lambda t: t.transpose(1, 2),
    "BSH": lambda t: t.transpose(1, 2).flatten(2),
    "SBH": lambda t: t.permute(2, 0, 1, 3).flatten(2),
}


def compressed_causal_mask() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_fusion_attention(layout: str, causal: bool) -> None:
    q, k, v = (torch.randn(2, heads, 7, 8, device="npu") for heads in (4, 2, 2))
    arrange = LAYOUTS[layout]
    mask = {"atten_mask": compressed_causal_mask(), "sparse_mode": 3} if causal else {}

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = (arrange(q), arrange(k), arrange(v))
        return torch_npu.npu_fusion_attention(*inputs, 4, layout, scale=0.3, **mask)[0]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return arrange(attend(q, k, v, is_causal=causal, enable_gqa=True, scale=0.3))

    got, wanted = value_and_grads(fused, q, k, v), value_and_grads(plain, q, k, v)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_fusion_attention_aligns_the_causal_mask_to_the_last_key() -> None:
    q, k, v = (torch.randn(1, 2, length, 8, device="npu") for length in (3, 5, 5))
    allowed = torch.ones(3, 5, dtype=torch.bool, device="npu").tril(2)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = compressed_causal_mask()
        return torch_npu.npu_fusion_attention(q, k, v, 2, "BNSD", atten_mask=mask, scale=0.3, sparse_mode=3)[
            0
        ]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=0.3)

    got, wanted = value_and_grads(fused, q, k, v), value_and_grads(plain, q, k, v)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_fusion_attention_keeps_packed_sequences_apart() -> None:
    q, k, v = (torch.randn(9, 4, 8, device="npu") for _ in range(3))
    ends = [4, 9]

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_npu.npu_fusion_attention(
            q,
            k,
            v,
            4,
            "TND",
            atten_mask=compressed_causal_mask(),
            scale=8**-0.5,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
            sparse_mode=3,
        )[0]

    def plain(*packed: Tensor) -> Tensor:
        outputs = []
        for start, end in ((0, 4), (4, 9)):
            sequence = (t[start:end].transpose(0, 1).unsqueeze(0) for t in packed)
            output = torch.nn.functional.scaled_dot_product_attention(*sequence, is_causal=True)
            outputs.append(output.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)

    got, wanted = value_and_grads(fused, q, k, v), value_and_grads(plain, q, k, v)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep_prob": 0.9}, RuntimeError, "dropout, pse and prefix"),
        ({"sparse_mode": 4}, RuntimeError, "not 4"),
        ({"sparse_mode": 3}, RuntimeError, "2048 x 2048 atten_mask"),
        ({"input_layout": "NBSD"}, RuntimeError, "unknown input_layout 'NBSD'"),
        ({"input_layout": "TND"}, RuntimeError, "TND needs actual_seq_qlen"),
    ],
)
def test_fusion_attention_refuses(options: dict, error: type[Exception], message: str) -> None:
    q = torch.randn(1, 2, 3, 8, device="npu")
    with pytest.raises(error, match=message):
        torch_npu.npu_fusion_attention(q, q, q, 2, **{"input_layout": "BNSD", **options})
