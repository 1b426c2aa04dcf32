"""Exactly the modules that the recipe means: whole parts of paths, linear layers, a reason for the rest."""

import functools
import re
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.targets.adapted import Adapted
from llamafactory_ascend.features.targets.inventory import is_linear
from llamafactory_ascend.features.targets.selection import exact, select
from tests.features.targets import families
from tests.features.targets.families import wish
from tests.training import load

TEXT = "model.language_model.layers"
VISION = "model.visual.blocks"


build = functools.cache(families.build)  # nothing here changes a model


def names(model: str, **components: Any) -> list[str]:
    return list(select(build(model), wish(**components)).names)


def test_text_and_the_last_vision_blocks() -> None:
    found = names(
        "qwen2_5_vl",
        text={"modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        vision={"modules": ["attn.qkv", "attn.proj"], "blocks": "last:1"},
    )
    assert found == [f"{VISION}.1.attn.qkv", f"{VISION}.1.attn.proj"] + [
        f"{TEXT}.{index}.self_attn.{name}_proj" for index in range(4) for name in "qkvo"
    ]


def test_a_pattern_is_whole_parts_of_a_path() -> None:
    """`proj` is no `q_proj` and no `down_proj`, and `qkv` no `in_proj_qkv`."""
    assert names("qwen2_5_vl", vision={"modules": "proj"}) == [f"{VISION}.{i}.attn.proj" for i in range(2)]
    for pattern in ("proj", "qkv", "kv_proj", "attn.q_proj"):
        with pytest.raises(AscendError, match=f"no linear layer fits `{pattern}`"):
            names("qwen3_5", text={"modules": pattern})


def test_a_whole_path_is_a_pattern() -> None:
    assert names("qwen2_5_vl", vision={"modules": f"{VISION}.1.attn.qkv"}) == [f"{VISION}.1.attn.qkv"]


def test_the_convolution_is_left_out_and_said() -> None:
    (match,) = select(build("qwen2_5_vl"), wish(vision={"modules": "proj"})).matches
    assert match.left_out == ("model.visual.patch_embed.proj (Conv3d)",)
    with pytest.raises(
        AscendError, match=r"patch_embed.proj is a Conv3d, and only linear layers are adapted"
    ):
        names("qwen2_5_vl", vision={"modules": "patch_embed.proj"})


@pytest.mark.parametrize(
    ("model", "component", "pattern", "count", "leaves"),
    [
        ("qwen2_5_vl", "text", "attention", 16, "q_proj k_proj v_proj o_proj"),
        ("qwen2_5_vl", "text", "mlp", 12, "gate_proj up_proj down_proj"),
        ("qwen2_5_vl", "vision", "attention", 4, "qkv proj"),
        ("qwen2_5_vl", "vision", "all", 10, "qkv proj gate_proj up_proj down_proj"),
        ("qwen2_vl", "vision", "mlp", 4, "fc1 fc2"),
        ("qwen3_vl", "vision", "mlp", 4, "linear_fc1 linear_fc2"),
        ("qwen3_vl", "projector", "all", 6, "linear_fc1 linear_fc2"),
        ("qwen3_5", "text", "attention", 4, "q_proj k_proj v_proj o_proj"),
        ("qwen3_5", "text", "deltanet", 9, "out_proj in_proj_qkv in_proj_z"),
        ("qwen3_next", "text", "deltanet", 6, "in_proj_qkvz out_proj"),
        (
            "qwen3_5",
            "text",
            "all",
            25,
            "out_proj in_proj_qkv in_proj_z gate_proj up_proj down_proj q_proj k_proj v_proj o_proj",
        ),
        ("qwen3_5_moe", "text", "mlp", 12, "gate_proj up_proj down_proj"),  # of the shared expert
        ("qwen2", "text", "all", 28, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
    ],
)
def test_sets(model: str, component: str, pattern: str, count: int, leaves: str) -> None:
    found = names(model, **{component: {"modules": pattern}})
    assert len(found) == count
    assert {path.rpartition(".")[2] for path in found} == set(leaves.split())


def test_the_output_head_only_by_name() -> None:
    assert names("qwen3_5", text={"modules": "lm_head"}) == ["lm_head"]
    with pytest.raises(AscendError, match=r"(?s)no block of `0` has `lm_head`.*it lies outside them"):
        names("qwen3_5", text={"modules": "lm_head", "blocks": 0})


def test_layers_named_by_a_number_only_with_their_parent() -> None:
    assert names("qwen2_5_vl", projector={"modules": ["mlp.0", "mlp.2"]}) == [
        "model.visual.merger.mlp.0",
        "model.visual.merger.mlp.2",
    ]
    with pytest.raises(AscendError, match=r"(?s)fits `all` but those .* by name.*write them: mlp.0, mlp.2"):
        names("qwen2_5_vl", projector={"modules": "all"})
    with pytest.raises(
        AscendError, match=r"(?s)no linear layer fits `mlp.1`: model.visual.merger.mlp.1 is a GELU"
    ):
        names("qwen2_5_vl", projector={"modules": "mlp.1"})


def test_gates_of_deltanet_only_by_name_and_with_a_warning() -> None:
    quiet = select(build("qwen3_5"), wish(text={"modules": "deltanet"}))
    assert quiet.warnings == ()
    assert quiet.matches[0].left_out == tuple(
        f"{TEXT}.N.linear_attn.in_proj_{name} (only by name)" for name in "ba"
    )
    found = select(build("qwen3_5"), wish(text={"modules": ["deltanet", "in_proj_a"], "blocks": 0}))
    assert [path.rpartition(".")[2] for path in found.names] == [
        "out_proj",
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_a",
    ]
    assert [one.partition(",")[0] for one in found.warnings] == ["`in_proj_a` is 4 wide"]
    assert found.matches[0].left_out == (f"{TEXT}.N.linear_attn.in_proj_b (only by name)",)


def test_routed_experts_are_said() -> None:
    """One 3-D parameter holds them all; the shared expert beside them is a module like others."""
    with pytest.raises(
        AscendError, match=r"layers.0.mlp.experts.down_proj holds all routed experts in one 3-D"
    ):
        names("qwen3_moe", text={"modules": "down_proj"})
    with pytest.raises(AscendError, match=r"fits `mlp`: model.layers.0.mlp.experts.gate_up_proj holds"):
        names("qwen3_moe", text={"modules": "mlp"})
    (match,) = select(build("qwen3_5_moe"), wish(text={"modules": "down_proj"})).matches
    assert len(match.modules) == 4
    assert match.left_out == (
        f"{TEXT}.N.mlp.experts.down_proj and such (routed experts in one 3-D parameter)",
    )


@pytest.mark.parametrize(
    ("components", "message"),
    [
        (
            {"text": {"modules": "q_porj"}},
            "`ascend.targets.text.modules`: no linear layer fits `q_porj`\n  next: did you mean `q_proj`",
        ),
        ({"text": {"modules": "xyzzy"}}, "next: it has: linear_attn.in_proj_a, linear_attn.in_proj_b, "),
        (
            {"vision": {"modules": "q_proj"}},
            "no linear layer fits `q_proj` there; the text component has some",
        ),
        (
            {"vision": {"modules": "deltanet"}},
            "next: it has: attn.proj, attn.qkv, mlp.linear_fc1, mlp.linear_fc2",
        ),
        (
            {"vision": {"modules": "attn.qkv", "blocks": "last:3"}},
            "`ascend.targets.vision.blocks`: `last:3` goes beyond the 2 blocks there are, 0 to 1",
        ),
        (
            {"text": {"modules": "q_proj", "blocks": "first:3"}},
            "no block of `first:3` has `q_proj`\n  next: blocks 3 have it",
        ),
        (
            {"projector": {"modules": "all", "blocks": 0}},
            "the projector has no numbered blocks in this model",
        ),
    ],
)
def test_what_fits_nothing(components: dict[str, Any], message: str) -> None:
    with pytest.raises(AscendError, match=re.escape(message)):
        names("qwen3_5", **components)


def test_a_text_model_has_no_tower() -> None:
    with pytest.raises(AscendError, match=r"(?s)`ascend.targets.vision`: this model has no .*it has: text"):
        names("qwen3", vision={"modules": "all"})


class QuantLinear(nn.Module):
    """As GPTQ and AWQ name theirs: no nn.Linear, and adapted like one."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = 2
        self.qweight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int32), requires_grad=False)


class LinearScaling(nn.Module):
    """Linear by name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))


def test_quantised_layers_are_linear() -> None:
    kinds = {
        "linear": nn.Linear(2, 2),
        "quantised": QuantLinear(),
        "scaling": LinearScaling(),
        "conv": nn.Conv1d(2, 2, 1),
    }
    assert [name for name, module in kinds.items() if is_linear(module)] == ["linear", "quantised"]


class Nested(nn.Module):
    """Every path of `layers` is the end of a path of `tail`."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"q_proj": nn.Linear(2, 2)}) for _ in range(depth))
        self.tail = nn.ModuleDict(
            {"layers": nn.ModuleList(nn.ModuleDict({"q_proj": nn.Linear(2, 2)}) for _ in range(depth))}
        )


@pytest.mark.parametrize("depth", [3, 13, 40])  # PEFT shortens lists of 20 and more
def test_a_path_that_is_the_end_of_another(depth: int) -> None:
    wanted = [f"layers.{index}.q_proj" for index in range(2, depth)]
    everywhere = get_peft_model(Nested(depth), LoraConfig(target_modules=wanted))
    assert len(Adapted.of(everywhere).modules) == 2 * len(wanted)
    chosen = exact(wanted, Nested(depth))
    assert isinstance(chosen, str)
    assert (
        list(Adapted.of(get_peft_model(Nested(depth), LoraConfig(target_modules=chosen))).modules) == wanted
    )


@pytest.mark.parametrize("blocks", [2, "2-31", "last:9"])
def test_block_2_is_not_block_12(blocks: Any) -> None:
    """PEFT adapts what was chosen, also where it shortens the list."""
    config = build("qwen3").config
    config.num_hidden_layers = 32
    config.layer_types = ["full_attention"] * 32
    with torch.device("meta"):
        model = type(build("qwen3"))(config)
        found = select(model, wish(text={"modules": "attention", "blocks": blocks})).names
        adapted = get_peft_model(model, LoraConfig(target_modules=exact(found, model)))
    assert len(found) in (4, 36, 120)
    assert list(Adapted.of(adapted).modules) == list(found)


def test_stock_peft_reads_the_adapter_again(assets: Any, tmp_path: Any) -> None:
    """The same modules on a fresh model, from a list; and a model with adapters is read like one without."""
    targets = wish(text={"modules": "attention"}, vision={"modules": "all", "blocks": "last:1"})
    model = load(assets / "qwen25vl")
    found = select(model, targets).names
    model = get_peft_model(model, LoraConfig(target_modules=exact(found, model)))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load(assets / "qwen25vl"), tmp_path)
    assert isinstance(again.peft_config["default"].target_modules, set)
    assert list(Adapted.of(again).modules) == list(found)
    assert select(again, targets).names == found
