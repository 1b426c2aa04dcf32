"""Adapters on what a replacement reads: they are heard, or the module keeps its own code."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from llamafactory_ascend.kernels.substitution import Order, Substitutions, substitute
from tests.kernels import tiny
from tests.kernels.reference import error

IDS = torch.randint(0, 60, (2, 70), generator=torch.Generator().manual_seed(1))
RULE = {"gated_delta_rule": "pytorch", "causal_conv1d": "pytorch"}


def logits(model: Any) -> Tensor:
    result: Tensor = model(input_ids=IDS, use_cache=False).logits
    return result


def adapted(**options: Any) -> Any:
    """A hybrid with adapters whose effect shows: no factor is zero."""
    torch.manual_seed(0)
    rank = 128 if options["target_modules"] == ["conv1d"] else 8  # PEFT wants a multiple of the 128 channels
    config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False, **options)
    model = get_peft_model(tiny.build("qwen3_5_text"), config)
    for name, parameter in model.named_parameters():
        if "modules_to_save.default" in name:
            with torch.no_grad():
                parameter.mul_(1.5)
    return model


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_lora_on_the_convolution(when: str) -> None:
    """The kernel would read the frozen weight: the whole operator keeps its own code, with the reason."""
    of = tiny.family("qwen3_5")
    stock, base = logits(adapted(target_modules=["conv1d"])), logits(tiny.build("qwen3_5_text"))
    assert error(stock, base) > 0.01
    done, order = Substitutions(), Order(of, tiny.choose(of, RULE), False, print)
    if when != "after":
        substitute(done, order)
    model = adapted(target_modules=["conv1d"])
    try:
        substitute(done, order, model)
        if when == "both":
            substitute(done, order, model)
        assert error(logits(model), stock) < 2e-6
        assert list(done.refused) == ["causal_conv1d_fn"]
        assert "its conv1d is a peft.tuners.lora.layer.Conv1d" in done.refused["causal_conv1d_fn"]
        assert {slot.switch.operator for slot in done.slots} == {"gated_delta_rule"}
        assert {operator for operator, _ in done.switches} == {"gated_delta_rule"}
    finally:
        done.revert()
    import transformers.models.qwen3_5.modeling_qwen3_5 as modeling

    assert modeling.causal_conv1d_fn is None and error(logits(model), stock) < 2e-6


@pytest.mark.parametrize("saved", ["conv1d", "norm", "mlp", "input_layernorm"])
def test_copies_to_save_are_what_computes(saved: str) -> None:
    """PEFT's copy of a module is trained in its place, and it is the copy's weight that a kernel reads."""
    of = tiny.family("qwen3_5")
    options: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": [saved]}
    stock, base = logits(adapted(**options)), logits(tiny.build("qwen3_5_text"))
    assert error(stock, base) > 0.01
    model = adapted(**options)
    done, _ = tiny.put(model, of, tiny.choose(of, RULE))
    try:
        ours = logits(model)
        assert done.refused == {} and error(ours, stock) < 2e-6
        ours.sum().backward()
        copies = [p for name, p in model.named_parameters() if "modules_to_save.default" in name]
        assert copies and all(p.grad is not None and bool(p.grad.any()) for p in copies if p.dim() != 0)
    finally:
        done.revert()


def test_adapters_around_the_gate_are_called() -> None:
    """SwiGLU's switch stands between the projections, which stay modules with their adapters."""
    from tests.kernels.test_substitution import NORM

    of = tiny.family("qwen3_5")
    options = {"target_modules": ["gate_proj", "up_proj", "down_proj", "in_proj_qkv", "out_proj"]}
    from llamafactory_ascend.kernels.backends import Backend

    theirs = [NORM, Backend("theirs", "swiglu", "llamafactory_ascend.kernels.references:swiglu")]
    choices = tiny.choose(of, {**RULE, "swiglu": "theirs", "rms_norm_1p": "theirs"}, more=theirs)
    stock, model = logits(adapted(**options)), adapted(**options)
    done, _ = tiny.put(model, of, choices)
    try:
        assert error(logits(model), stock) < 2e-6 and done.refused == {}
        assert {slot.switch.operator for slot in done.slots} == {*RULE, "swiglu", "rms_norm_1p"}
    finally:
        done.revert()


def test_a_convolution_with_a_forward_of_its_own() -> None:
    of, model = tiny.family("qwen3_5"), tiny.build("qwen3_5_text")
    layer: Any = model.model.layers[0].linear_attn.conv1d  # type: ignore[union-attr, index]
    layer.forward = layer.forward
    done, _ = tiny.put(model, of, tiny.choose(of, RULE))
    assert done.refused == {"causal_conv1d_fn": "the forward of its conv1d has been replaced"}
    done.revert()
