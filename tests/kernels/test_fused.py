"""torch_npu's operators in every class of every family, on the simulated NPU, against formulas in float64.

The simulated operators round as their definitions say; the numerics of real ones cannot be seen here.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llamafactory_ascend.kernels.families import FAMILIES, Family
from llamafactory_ascend.kernels.substitution import Slot, Substitutions
from tests.conftest import SIMULATOR_MISSING
from tests.kernels import tiny
from tests.kernels.reference import error

FUSED = ("rms_norm", "rms_norm_1p", "rms_norm_gated", "rope", "swiglu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
NPU = "npu"

pytestmark = pytest.mark.skipif(bool(SIMULATOR_MISSING), reason=str(SIMULATOR_MISSING))


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def substituted(request: pytest.FixtureRequest) -> Iterator[tuple[Family, Substitutions]]:
    """A model of the family with every fused operator of torch_npu in place."""
    family: Family = request.param
    model = tiny.build(family.name).to(NPU)
    choices = tiny.choose(family, dict.fromkeys(wanted(family), "torch_npu"), NPU)
    done, said = tiny.put(model, family, choices)
    assert said == [] and done.refused == {}
    yield family, done
    done.revert()


def wanted(family: Family) -> list[str]:
    return [name for name in FUSED if family.support(name).level != "unsupported"]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(NPU).requires_grad_()
    )


def compare(output: Any, expected: Any, inputs: list[Tensor], wide: list[Tensor], dtype: torch.dtype) -> None:
    """Hold outputs and input gradients against those of the float64 formula."""
    outputs, truths = (x if isinstance(x, tuple) else (x,) for x in (output, expected))
    for actual, right in zip(outputs, truths, strict=True):
        assert actual.dtype == dtype
        assert error(actual.cpu(), right) < TOLERANCE[dtype]
    direction = [torch.cos(torch.arange(x.numel())).reshape(x.shape) for x in truths]
    got = torch.autograd.grad(outputs, inputs, [d.to(dtype).to(NPU) for d in direction])
    right = torch.autograd.grad(truths, wide, [d.to(dtype).double() for d in direction])
    for actual, expect in zip(got, right, strict=True):
        assert error(actual.cpu(), expect) < 2 * TOLERANCE[dtype]


def wide_copies(inputs: list[Tensor]) -> list[Tensor]:
    return [x.detach().cpu().double().requires_grad_() for x in inputs]


def normed(x: Tensor, module: Any) -> Tensor:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def slots(done: Substitutions, operator: str) -> list[Slot]:
    """Return one slot for each class that holds an operator by its forward."""
    found = {slot.switch.place: slot for slot in done.slots if slot.switch.operator == operator}
    return list(found.values())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_norms(substituted: tuple[Family, Substitutions], dtype: torch.dtype) -> None:
    family, done = substituted
    for operator in ("rms_norm", "rms_norm_1p", "rms_norm_gated"):
        found = slots(done, operator)
        classes = {name for place in family.places if place.operator == operator for name in place.classes}
        assert {slot.switch.place for slot in found} == classes
        for slot in found:
            module: Any = slot.module.to(dtype)
            weight = module.weight.detach().cpu().double()
            inputs = [random(3, 5, weight.numel(), dtype=dtype, seed=1)]
            if operator == "rms_norm_gated":
                inputs.append(random(3, 5, weight.numel(), dtype=dtype, seed=2))
            wide = wide_copies(inputs)
            expected = normed(wide[0], module) * (weight + (operator == "rms_norm_1p"))
            if operator == "rms_norm_gated":
                expected = expected * torch.nn.functional.silu(wide[1])
            compare(module(*inputs), expected, inputs, wide, dtype)
            assert slot.switch.backend == "torch_npu" and not slot.switch.failures


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_swiglu(substituted: tuple[Family, Substitutions], dtype: torch.dtype) -> None:
    family, done = substituted
    found = slots(done, "swiglu")
    assert found, family.name
    for slot in found:
        module: Any = slot.module.to(dtype)
        width = module.gate_proj.in_features
        inputs = [random(3, 5, width, dtype=dtype, seed=1)]
        wide = wide_copies(inputs)
        layers = [getattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")]
        gate, up = (linear(wide[0], layer) for layer in layers[:2])
        expected = linear(torch.nn.functional.silu(gate) * up, layers[2])
        compare(module(*inputs), expected, inputs, wide, dtype)
        assert slot.switch.backend == "torch_npu" and not slot.switch.failures


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    bias = None if layer.bias is None else layer.bias.detach().cpu().double()
    return torch.nn.functional.linear(x, layer.weight.detach().cpu().double(), bias)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rotary_embeddings(substituted: tuple[Family, Substitutions], dtype: torch.dtype) -> None:
    """Text (whole heads, their first quarter, in sections of time, height and width) and vision."""
    family, done = substituted
    switches = {place: switch for (operator, place), switch in done.switches.items() if operator == "rope"}
    assert "apply_rotary_pos_emb_vision" in switches or not any(
        p.form == "rope_vision" for p in family.places
    )
    for name, switch in switches.items():
        channels, vision = 16, name.endswith("vision")
        shape = (7, 2, 16) if vision else (2, 3, 7, channels if family.name in ("qwen2", "qwen3") else 64)
        inputs = [random(*shape, dtype=dtype, seed=seed) for seed in (1, 2)]
        angles = torch.rand(
            *([3] if "multimodal" in name else []), *([] if vision else [2]), 7, channels // 2
        )
        angles = torch.cat([angles, angles], -1) * 6
        tables = [x.to(dtype).to(NPU) for x in (angles.cos(), angles.sin())]
        wide = wide_copies(inputs)
        cos, sin = (x.cpu().double() for x in tables)
        rest: tuple[Any, ...] = ()
        if "multimodal" in name:
            inputs = [x[..., :channels].detach().clone().requires_grad_() for x in inputs]
            wide = wide_copies(inputs)
            rest = ([4, 2, 2],)
            cos, sin = (sections(x, [4, 2, 2]) for x in (cos, sin))
        expected = tuple(rotate(x, cos[:, None], sin[:, None]) for x in wide)
        compare(switch(*inputs, *tables, *rest), expected, inputs, wide, dtype)
        assert switch.backend == "torch_npu" and not switch.failures


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, kept], -1)


def sections(table: Tensor, lengths: list[int]) -> Tensor:
    parts = table.split(lengths * 2, -1)
    return torch.cat([part[place % 3] for place, part in enumerate(parts)], -1)


def test_one_plus_weight_is_added_in_float32() -> None:
    """In bfloat16, 1 + 0.003 is 1: the weight would have no effect."""
    from llamafactory_ascend.kernels.fused.norms import rms_norm_1p

    weight = torch.full((64,), 0.003, dtype=torch.bfloat16)
    x = random(4, 64, dtype=torch.float32, seed=3)
    expected = x.detach().cpu().double()
    expected = expected * torch.rsqrt(expected.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight.double())
    assert error(rms_norm_1p(x, weight.to(NPU), 1e-6).detach().cpu(), expected) < 1e-6


def test_mixed_dtypes() -> None:
    """A norm kept in float32 (`upcast_layernorm`) gives float32, as in Transformers; so do wide tables."""
    from llamafactory_ascend.kernels.fused.activation import swiglu
    from llamafactory_ascend.kernels.fused.norms import rms_norm
    from llamafactory_ascend.kernels.fused.rotary import rope

    x = random(2, 3, 4, 8, dtype=torch.bfloat16, seed=4)
    assert rms_norm(x, torch.ones(8, device=NPU), 1e-6).dtype == torch.float32
    table = torch.ones(2, 1, 4, 8, device=NPU)
    assert rope(x, table, table).dtype == torch.float32
    assert swiglu(x, x.float()).dtype == torch.bfloat16
