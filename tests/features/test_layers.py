"""Which layers there are and which take part in backward, decided from names and `requires_grad` alone."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from llamafactory_ascend.features.layers import component_of, plain_name, plan

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Layer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(depth))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.audio_tower, self.visual, self.language_model = Stack(2), Stack(2), Stack(2)
        self.requires_grad_(False)


def in_backward(model: nn.Module) -> list[str]:
    return [layer.name for layer in plan(model).values() if layer.needs_graph]


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("model.visual.blocks.3.attn.qkv", "vision"),
        ("model.visual.merger.linear_fc1", "projector"),
        ("model.visual.deepstack_merger_list.0", "projector"),
        ("model.multi_modal_projector.linear_1", "projector"),
        ("thinker.audio_tower.layers.0", "vision"),
        ("model.language_model.layers.0.self_attn.q_proj", "text"),
        ("model.visualise.layers.0", "text"),
        ("model.layers.0.mlp", "text"),
    ],
)
def test_a_path_is_placed_by_whole_parts(name: str, component: str) -> None:
    assert component_of(name) == component


@pytest.mark.parametrize(
    "wrapped",
    [
        "model.layers.0",
        "base_model.model.model.layers.0",
        "module.base_model.model.model.layers.0",
        "pretrained_model.base_model.model.model.layers.0",
        "_fsdp_wrapped_module.base_model.model.model.layers.0._fsdp_wrapped_module",
        "base_model.model.model.layers.0._orig_mod",
        "_orig_mod.module.model.layers.0._checkpoint_wrapped_module",
    ],
)
def test_wrappers_leave_no_trace_in_a_name(wrapped: str) -> None:
    assert plain_name(wrapped) == "model.layers.0"


def test_layers_below_the_first_adapter_need_no_graph(assets: Path) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(assets / "qwen3_5")
    layers = plan(get_peft_model(model, LoraConfig(target_modules=ATTENTION))).values()
    # three DeltaNet layers lie below the one attention layer
    assert [(layer.component, layer.needs_graph) for layer in layers] == [
        *[("vision", False)] * 2,
        *[("text", False)] * 3,
        ("text", True),
    ]


def test_trainable_embeddings_put_every_text_layer_in_backward(assets: Path) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(assets / "qwen3_5")
    model = get_peft_model(model, LoraConfig(target_modules=["o_proj"], modules_to_save=["embed_tokens"]))
    assert in_backward(model) == [f"model.language_model.layers.{index}" for index in range(4)]


def test_a_trainable_output_head_puts_no_layer_in_backward(assets: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(assets / "qwen3").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert in_backward(model) == []


def test_a_trainable_projector_puts_the_text_model_in_backward_and_not_the_tower(assets: Path) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(assets / "qwen25vl").requires_grad_(
        False
    )
    model.model.visual.merger.requires_grad_(True)
    layers = [layer for layer in plan(model).values() if layer.needs_graph]
    assert Counter(layer.component for layer in layers) == {"text": 4}
    assert all(layer.only_with_images for layer in layers)


def test_towers_do_not_feed_each_other() -> None:
    model = TwoTowers()
    model.audio_tower.blocks[1].requires_grad_(True)
    assert in_backward(model) == [
        "audio_tower.blocks.1",
        "language_model.blocks.0",
        "language_model.blocks.1",
    ]


def test_the_container_is_the_module_whose_forward_runs_the_layer() -> None:
    model = TwoTowers()
    model.visual.blocks[0] = torch.compile(model.visual.blocks[0])
    layers = {layer.name: layer for layer in plan(model).values()}
    assert layers["visual.blocks.0"].container == id(model.visual)
    assert layers["language_model.blocks.1"].container == id(model.language_model)


def test_the_27b_reference_model_is_planned_on_the_meta_device() -> None:
    text = {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 17408,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "full_attention_interval": 4,
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 5120,
    }
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.Qwen3_5ForConditionalGeneration(config)
        model = get_peft_model(model, LoraConfig(r=8, target_modules=ATTENTION))
    assert model.get_nb_trainable_parameters() == (5_242_880, 27_361_971_440)
    layers = plan(model).values()
    assert Counter(layer.component for layer in layers) == {"text": 64, "vision": 27}
    # attention is every fourth layer, so the first adapter lies in layer 3
    assert in_backward(model) == [f"model.language_model.layers.{index}" for index in range(3, 64)]
