"""The plan for a training: when nothing is replaced, what is refused, who else replaces operators."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import kernels
from llamafactory_ascend.run import Arguments, Run
from llamafactory_ascend.settings import read
from tests.conftest import SIMULATOR_MISSING
from tests.kernels import tiny

needs_npu = pytest.mark.skipif(bool(SIMULATOR_MISSING), reason=str(SIMULATOR_MISSING))
RULE = {"gated_delta_rule": "pytorch", "causal_conv1d": "pytorch"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No plan is left in this process, and nothing of it in Transformers."""
    yield
    forget()


def forget() -> None:
    for plan in kernels._plans:
        plan.revert()
    kernels._plans.clear()


def arguments(device: str = "npu", stage: str = "sft", path: str = "hub/name", **changes: Any) -> Arguments:
    model = {"model_name_or_path": path, "use_v1_kernels": False, "enable_liger_kernel": False}
    data = {"packing": None, "neat_packing": False}
    return Arguments(
        model=SimpleNamespace(**{key: changes.get(key, value) for key, value in model.items()}),
        data=SimpleNamespace(**{key: changes.get(key, value) for key, value in data.items()}),
        training=SimpleNamespace(
            device=torch.device(device),
            do_train=changes.get("do_train", True),
            torch_compile=changes.get("torch_compile", False),
        ),
        finetuning=SimpleNamespace(stage=stage),
        generating=None,
    )


def run(setting: Any) -> Run:
    return Run(settings=read({"kernels": setting}, "test.yaml"))


def prepare(setting: Any, model_type: str = "qwen3_5", **changes: Any) -> Run:
    now = run(setting)
    kernels.prepare(now, arguments(**changes), model_type)
    return now


@needs_npu
def test_auto_on_an_npu() -> None:
    now = prepare("auto")
    found = {name: decision.choice for name, decision in now.decisions.items()}
    assert found["kernels.gated_delta_rule"] == "pytorch" and found["kernels.rope"] == "torch_npu"
    assert "fla: flash-linear-attention is not installed" in now.decisions["kernels.gated_delta_rule"].reason
    assert kernels.replaces("gated_delta_rule") and not kernels.replaces("rms_norm")


def test_auto_elsewhere_replaces_nothing() -> None:
    now = prepare("auto", device="cpu")
    (decision,) = now.decisions.values()
    assert decision.choice == "left as they are" and "`auto` replaces nothing on a CPU" in decision.reason
    model = tiny.build("qwen3_5_text")
    kernels.ascend_after_model(now, model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert now.findings == [] and kernels.ascend_trainer_callbacks(now, None) == []  # type: ignore[arg-type]


def test_off() -> None:
    assert prepare("off", device="cpu").decisions["kernels"].choice == "left as they are"
    assert kernels.plan() is None and kernels.ascend_report_sections(Run()) == {"kernels": None}


def test_a_name_that_cannot_be_used() -> None:
    with pytest.raises(AscendError, match="fla cannot be used: it runs on npu, this is cpu"):
        prepare({"gated_delta_rule": "fla"}, device="cpu")


@needs_npu
def test_other_replacements_are_respected() -> None:
    """Norms, rope and SwiGLU are theirs; the rule, which neither has, stays ours."""
    for key, word in (("use_v1_kernels", "host's own kernels"), ("enable_liger_kernel", "Liger")):
        forget()
        now = prepare("auto", **{key: True})
        for operator in kernels.FUSED:
            if operator != "rms_norm":  # which this family does not have
                decision = now.decisions[f"kernels.{operator}"]
                assert decision.choice == "transformers" and word in decision.reason
        assert now.decisions["kernels.gated_delta_rule"].choice == "pytorch"
    forget()
    with pytest.raises(AscendError, match="use_v1_kernels"):
        prepare({"rope": "torch_npu"}, use_v1_kernels=True)


@needs_npu
def test_a_compiled_model_is_left_alone() -> None:
    """Traced, it would pass what probes and counts: `auto` says so, a named back end is an error."""
    now = prepare("auto", torch_compile=True)
    decision = now.decisions["kernels"]
    assert decision.choice == "left as they are" and "`torch_compile: true`" in decision.reason
    model = tiny.build("qwen3_5_text")
    kernels.ascend_after_model(now, model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert now.findings == []
    forget()
    with pytest.raises(AscendError, match=r"rope: torch_npu: `torch_compile: true`") as caught:
        prepare({"rope": "torch_npu"}, torch_compile=True)
    assert caught.value.hint == "set `torch_compile: false`"
    forget()
    with pytest.raises(AscendError, match=r"from one packed sample into the next .*torch_compile"):
        prepare("auto", torch_compile=True, neat_packing=True)


def adapted() -> Any:
    """A hybrid with LoRA on its convolutions, of whose 128 channels PEFT wants the rank to be a multiple."""
    config = LoraConfig(r=128, target_modules=["conv1d"])
    return get_peft_model(tiny.build("qwen3_5_text"), config)


def test_an_adapter_on_the_convolution() -> None:
    """`auto` leaves the operator as it is and says why; a named back end is an error with the reason."""
    now = prepare({"gated_delta_rule": "pytorch"}, device="cpu")
    (current,) = kernels._plans
    chosen = tiny.choose(tiny.family("qwen3_5"), RULE)
    auto = replace(chosen["causal_conv1d"], explicit=False)
    current.choices = {**current.choices, "causal_conv1d": auto}
    kernels.ascend_after_model(now, adapted())
    (finding,) = now.findings
    assert finding.level == "warning" and "its conv1d is a peft.tuners.lora.layer.Conv1d" in finding.message
    forget()
    now = prepare(RULE, device="cpu")
    with pytest.raises(AscendError, match=r"causal_conv1d: its conv1d is a peft"):
        kernels.ascend_after_model(now, adapted())


@needs_npu
def test_an_adapter_on_the_convolution_with_packing() -> None:
    """What is left cannot keep samples apart."""
    now = prepare("auto", "qwen3_5_text", neat_packing=True)
    with pytest.raises(
        AscendError, match=r"causal_conv1d of .* cannot keep packed samples apart: its conv1d"
    ):
        kernels.ascend_after_model(now, adapted())


@needs_npu
@pytest.mark.parametrize("key", ["packing", "neat_packing"])
def test_packing_without_boundaries_is_refused(key: str) -> None:
    for setting in ("off", {"gated_delta_rule": "off"}, {"causal_conv1d": "off"}):
        with pytest.raises(AscendError, match="from one packed sample into the next") as caught:
            prepare(setting, **{key: True})
        assert "neat_packing: false" in caught.value.hint
    prepare("auto", "qwen3_5_text", **{key: True})
    plan = kernels.plan()
    assert plan is not None and plan.packed


@needs_npu
def test_packing_that_mixes_nothing() -> None:
    """A dense model has no state to carry, and pre-training joins its texts by design."""
    prepare("off", "qwen3", neat_packing=True)
    prepare("off", stage="pt", packing=True)


@needs_npu
def test_plain_packing_of_a_vision_language_model_is_refused() -> None:
    with pytest.raises(AscendError, match="numbers each row through") as caught:
        prepare("auto", packing=True)
    assert caught.value.hint == "set `neat_packing: true`"
    prepare("auto", neat_packing=True, packing=True)


def test_plain_packing_of_a_vision_language_model_elsewhere_is_a_warning() -> None:
    """Its collator numbers rows through; the text model keeps the positions of the data set."""
    (finding,) = prepare(RULE, device="cpu", packing=True).findings
    assert finding.level == "warning" and "`neat_packing: true`" in finding.message
    forget()
    assert prepare(RULE, "qwen3_5_text", device="cpu", packing=True).findings == []
    forget()
    assert prepare(RULE, device="cpu", neat_packing=True, packing=True).findings == []


def test_packing_elsewhere_is_a_warning() -> None:
    now = prepare("off", device="cpu", neat_packing=True)
    assert [finding.level for finding in now.findings] == ["warning"]
    forget()
    assert prepare(RULE, device="cpu", neat_packing=True).findings == []


def test_experimental_is_noted() -> None:
    now = prepare({"gated_delta_rule": "pytorch"}, "qwen3_5_moe", device="cpu")
    assert [finding.level for finding in now.findings] == ["note"]
    assert "experimental" in now.findings[0].message


def test_a_local_model_is_judged_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}), encoding="utf-8")
    now = run(RULE)
    kernels.ascend_arguments(now, arguments("cpu", path=str(tmp_path)))
    assert kernels.replaces("gated_delta_rule")
    kernels.ascend_arguments(now, arguments("cpu"))  # another training: of a model that is not here yet
    assert kernels.plan() is None
    kernels.ascend_arguments(now, arguments("cpu", path=str(tmp_path), do_train=False))
    assert kernels.plan() is None


@needs_npu
def test_a_gated_norm_made_for_cuda_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch_npu's CUDA disguise, flash-linear-attention's class is chosen and asks for a CUDA device."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    def build(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(modeling, "FusedRMSNormGated", build, raising=False)
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        tiny.build("qwen3_5_text")
    now = prepare("auto")
    model: Any = tiny.build("qwen3_5_text")
    assert type(model.model.layers[0].linear_attn.norm).__name__ == "Qwen3_5RMSNormGated"
    assert now.decisions["kernels.gated_norm_class"].choice == "Transformers' own"
    forget()  # while what it puts back is still this test's


@needs_npu
def test_a_model_without_an_operator() -> None:
    """Most mixtures of experts have no dense layer: a note, even where the recipe says `auto`."""
    now = prepare("auto", "qwen3_moe")
    model: Any = tiny.build("qwen3_moe")
    model.model.layers[0].mlp = model.model.layers[1].mlp
    kernels.ascend_after_model(now, model)
    assert [finding.message for finding in now.findings if finding.level == "note"][1:] == [
        "swiglu: no module of Qwen3MoeForCausalLM holds it"
    ]


@needs_npu
def test_a_model_without_any() -> None:
    """A family whose classes have been renamed: an error where the recipe asks for kernels."""
    now = prepare("auto")
    with pytest.raises(AscendError, match="nothing was replaced: no module of Linear is known"):
        kernels.ascend_after_model(now, torch.nn.Linear(2, 2))


def test_an_operator_that_was_named_must_be_there() -> None:
    now = prepare(RULE, device="cpu")
    with pytest.raises(AscendError, match="gated_delta_rule: no module of Linear holds it"):
        kernels.ascend_after_model(now, torch.nn.Linear(2, 2))


def test_report() -> None:
    now = prepare(RULE, device="cpu")
    kernels.ascend_after_model(now, tiny.build("qwen3_5_text"))
    section = kernels.ascend_report_sections(now)["kernels"]
    assert json.loads(json.dumps(section)) == section
    assert section["choices"]["gated_delta_rule"]["backend"] == "pytorch"
    assert [switch["operator"] for switch in section["switches"]] == ["gated_delta_rule", "causal_conv1d"]
