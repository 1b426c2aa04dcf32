"""Substitution: structure, reversal, the switch's decisions, packed samples."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.kernels.backends import Backend
from llamafactory_ascend.kernels.substitution import Substitutions
from llamafactory_ascend.kernels.switch import Switch
from tests.kernels import tiny
from tests.kernels.reference import error

IDS = torch.randint(0, 60, (2, 70), generator=torch.Generator().manual_seed(1))
RULE = {"gated_delta_rule": "pytorch", "causal_conv1d": "pytorch"}
NORM = Backend("theirs", "rms_norm_1p", "tests.kernels.test_substitution:right_norm")


def right_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + weight.float())).to(x.dtype)


def wrong_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The weight as it is: right for another family."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def half_right_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Within the limit of the probe."""
    return 1.01 * right_norm(x, weight, eps)


def broken_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    raise RuntimeError("ub overflow detected\nwith a long trace")


def half_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    assert x.dtype == torch.bfloat16
    return right_norm(x, weight, eps)


def logits(model: Any, ids: Tensor = IDS, **kwargs: Any) -> Tensor:
    result: Tensor = model(input_ids=ids, use_cache=False, **kwargs).logits
    return result


def with_norms(
    wish: str, *functions: str, armed: bool = True, **change: Any
) -> tuple[Any, Substitutions, list[str]]:
    """A hybrid whose norms go through back ends named after functions of this module, the first one first."""
    of, model = tiny.family("qwen3_5"), tiny.build("qwen3_5_text")
    theirs = [
        replace(NORM, name=name, order=place, target=f"tests.kernels.test_substitution:{name}", **change)
        for place, name in enumerate(functions)
    ]
    if wish == "auto":  # off an NPU `auto` replaces nothing; the order of back ends is what is tested here
        choice = tiny.choose(of, {"rms_norm_1p": "auto"}, "npu", more=theirs)["rms_norm_1p"]
        usable = tuple(one for one in choice.usable if one.name in functions)
        choices = {**tiny.choose(of, {}), "rms_norm_1p": replace(choice, usable=usable)}
    else:
        choices = tiny.choose(of, {"rms_norm_1p": wish}, more=theirs)
    done, said = tiny.put(model, of, choices)
    for switch in done.switches.values():
        switch.armed = armed
    return model, done, said


def only(done: Substitutions) -> Switch:
    (switch,) = done.switches.values()
    return switch


def test_every_module_of_a_class_and_back_again() -> None:
    """Four layers have two norms each, one of them two more, and the model one: 11."""
    model, done, _ = with_norms("right_norm", "right_norm")
    assert len(done.slots) == 11
    ours = logits(model)
    held = [vars(slot.module) for slot in done.slots]
    assert all("forward" in attributes for attributes in held)
    done.revert()
    assert not any("forward" in attributes for attributes in held)
    assert error(ours, logits(model)) < 1e-6


def test_a_copy_of_a_module_is_its_own() -> None:
    """PEFT copies modules (`modules_to_save`): the copy must use its own weight."""
    import copy

    _, done, _ = with_norms("right_norm", "right_norm")
    module: Any = done.slots[0].module
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()
    x = torch.randn(3, 64)
    assert error(other(x), right_norm(x, torch.zeros(64), 1e-6)) < 1e-6
    assert error(module(x), right_norm(x, module.weight, 1e-6)) < 1e-6


def test_wrong_numbers_auto() -> None:
    """The next back end takes over before anything was computed with the wrong one, with one message."""
    model, done, said = with_norms("auto", "wrong_norm", "right_norm")
    stock = logits(tiny.build("qwen3_5_text"))
    assert error(logits(model), stock) < 1e-6
    switch = only(done)
    assert switch.backend == "right_norm"
    assert "differs from Qwen3_5RMSNorm by " in switch.failures["wrong_norm"]
    assert len(said) == 1 and "right_norm computes it" in said[0] and "(limit 5%)" in said[0]


def test_what_another_rank_gave_up() -> None:
    """It passed here; after the step the next one is probed, and behind the last one is the old code."""
    model, done, said = with_norms("auto", "half_right_norm", "wrong_norm", "right_norm")
    stock, switch = logits(tiny.build("qwen3_5_text")), only(done)
    logits(model)
    assert switch.backend == "half_right_norm" and said == []
    switch.follow(switch.failures, 0)
    switch.follow({"wrong_norm": "its turn has not come"}, 2)
    assert switch.backend == "half_right_norm" and said == []
    switch.follow({"half_right_norm": "it differs", "wrong_norm": "it differs too"}, 3)
    assert switch.backend == "right_norm" and switch.failures["half_right_norm"] == "on rank 3 it differs"
    assert len(said) == 1 and "half_right_norm is not used for Qwen3_5RMSNorm: on rank 3" in said[0]
    assert switch.armed and error(logits(model), stock) < 1e-6 and not switch.armed
    switch.follow({"right_norm": "it differs"}, 1)
    assert switch.backend == "transformers" and torch.equal(logits(model), stock)


def test_wrong_numbers_and_nothing_else() -> None:
    model, done, said = with_norms("auto", "wrong_norm")
    assert torch.equal(logits(model), logits(tiny.build("qwen3_5_text")))
    assert only(done).backend == "transformers" and len(said) == 1


@pytest.mark.parametrize("armed", [True, False])
def test_first_use_fails_auto(armed: bool) -> None:
    """Outside a training step too, where there is no probe; one message for two failures."""
    model, done, said = with_norms("auto", "broken_norm", "missing_norm", "right_norm", armed=armed)
    assert error(logits(model), logits(tiny.build("qwen3_5_text"))) < 1e-6
    assert only(done).backend == "right_norm"
    assert list(only(done).failures) == ["broken_norm", "missing_norm"]
    assert len(said) == 1 and "RuntimeError: ub overflow detected." in said[0] and "trace" not in said[0]


@pytest.mark.parametrize("name, message", [("wrong_norm", "differs from"), ("broken_norm", "ub overflow")])
def test_explicit_is_an_error(name: str, message: str) -> None:
    model, _, said = with_norms(name, name)
    with pytest.raises(AscendError, match=message):
        logits(model)
    assert said == []


def test_dtypes_that_a_back_end_does_not_take() -> None:
    """float32 inputs are cast for it, and its result back."""
    model, done, _ = with_norms("half_norm", "half_norm", dtypes=("float16", "bfloat16"))
    found = logits(model)
    comparison = only(done).comparison
    assert comparison is not None and comparison.passed
    assert 1e-4 < error(found, logits(tiny.build("qwen3_5_text"))) < 0.05


def test_a_forward_that_somebody_else_replaced() -> None:
    of, model = tiny.family("qwen3_5"), tiny.build("qwen3_5_text")
    for module in model.modules():
        if type(module).__name__ == "Qwen3_5RMSNorm":
            module.forward = module.forward  # type: ignore[method-assign]
    done, _ = tiny.put(model, of, tiny.choose(of, {"rms_norm_1p": "theirs"}, more=[NORM]))
    assert done.refused == {"Qwen3_5RMSNorm": "its forward has been replaced by somebody else"}
    assert done.slots == []


def test_another_activation_is_refused() -> None:
    of, model = tiny.family("qwen3"), tiny.build("qwen3")
    for module in model.modules():
        if type(module).__name__ == "Qwen3MLP":
            module.act_fn = torch.nn.GELU()
    choices = tiny.choose(of, {"swiglu": "x"}, more=[Backend("x", "swiglu", "torch:mul")])
    done, _ = tiny.put(model, of, choices)
    assert done.refused == {"Qwen3MLP": "its activation is GELU"}


def test_a_callable_of_somebody_else_is_found_and_replaced() -> None:
    """Any module that holds the callable counts, whatever its class; what it held is reported."""

    def chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not to be called")

    of, model = tiny.family("qwen3_5"), tiny.build("qwen3_5_text")
    stranger = torch.nn.Module()
    stranger.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[assignment]
    model.stranger = stranger
    layers = [m for m in model.modules() if "chunk_gated_delta_rule" in vars(m) and m is not stranger]
    for layer in layers[:2]:
        layer.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[assignment]
    done, _ = tiny.put(model, of, tiny.choose(of, RULE))
    assert len([slot for slot in done.slots if slot.switch.operator == "gated_delta_rule"]) == 4
    assert done.found == {"gated_delta_rule": f"{__name__}.chunk_gated_delta_rule"}
    assert logits(model).isfinite().all()
    done.revert()
    assert layers[0].chunk_gated_delta_rule is chunk_gated_delta_rule


def test_nothing_twice() -> None:
    """Before the build, after it, and once more: one switch for each operator, one slot for each module."""
    from llamafactory_ascend.kernels.substitution import Order, substitute

    of = tiny.family("qwen3_5")
    done, order = Substitutions(), Order(of, tiny.choose(of, RULE), False, print)
    substitute(done, order)
    model = tiny.build("qwen3_5_text")
    for _ in range(2):
        substitute(done, order, model)
    assert (len(done.switches), len(done.slots)) == (2, 6)
    done.revert()
    import transformers.models.qwen3_5.modeling_qwen3_5 as modeling

    assert not isinstance(modeling.torch_chunk_gated_delta_rule, Switch)


def test_packed_samples_do_not_reach_the_old_code() -> None:
    """A rule that fails while samples are packed must not be replaced by one that mixes them."""
    of, model = tiny.family("qwen3_5"), tiny.build("qwen3_5_text")
    theirs = Backend("b", "gated_delta_rule", "tests.kernels.test_substitution:broken_norm", varlen=True)
    choices = tiny.choose(of, RULE, packed=True, more=[theirs])
    broken = replace(choices["gated_delta_rule"], usable=(theirs,), explicit=False)
    done, _ = tiny.put(model, of, {**choices, "gated_delta_rule": broken}, packed=True)
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None].expand(2, -1)
    with pytest.raises(AscendError, match="cannot keep packed samples apart"):
        logits(model, position_ids=positions)
    done.revert()


def test_fallback_of_the_rule_without_packing() -> None:
    """With equal results, the old code takes over and the run goes on."""
    of, model = tiny.family("qwen3_5"), tiny.build("qwen3_5_text")
    theirs = Backend("b", "gated_delta_rule", "tests.kernels.test_substitution:broken_norm")
    broken = replace(tiny.choose(of, RULE)["gated_delta_rule"], usable=(theirs,), explicit=False)
    done, said = tiny.put(model, of, {**tiny.choose(of, {}), "gated_delta_rule": broken})
    assert torch.equal(logits(model), logits(tiny.build("qwen3_5_text")))
    assert len(said) == 1 and "transformers computes it" in said[0]
    done.revert()
