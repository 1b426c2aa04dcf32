"""A small model of every family in the table of layouts, on the meta device: names and shapes only."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from llamafactory_ascend import settings
from llamafactory_ascend.features.targets.request import Targets
from tests.assets.models import HYBRID, HYBRID_VISION, MODELS, SMALL, TOKENS, VISION_TOKENS

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSTACK = {**HYBRID_VISION, "deepstack_visual_indexes": [0, 1]}


def qwen2_vl() -> PreTrainedModel:
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4}
    text = {**TOKENS, **SMALL, "rope_parameters": ROPE}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **VISION_TOKENS)
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen3_vl() -> PreTrainedModel:
    text = {**TOKENS, **SMALL, "head_dim": 16}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=DEEPSTACK, **VISION_TOKENS)
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen3_vl_moe() -> PreTrainedModel:
    text = {**TOKENS, **SMALL, **EXPERTS, "head_dim": 16}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=DEEPSTACK, **VISION_TOKENS)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def qwen3_moe() -> PreTrainedModel:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**TOKENS, **SMALL, **EXPERTS, head_dim=16)
    )


def qwen3_next() -> PreTrainedModel:
    hybrid = {key: value for key, value in HYBRID.items() if key != "rope_parameters"}
    config = transformers.Qwen3NextConfig(**TOKENS, **hybrid, **EXPERTS, shared_expert_intermediate_size=32)
    return transformers.Qwen3NextForCausalLM(config)


def qwen3_5_moe_text() -> PreTrainedModel:
    text = {key: value for key, value in HYBRID.items() if key != "intermediate_size"}
    config = transformers.Qwen3_5MoeTextConfig(
        **TOKENS, **text, **EXPERTS, shared_expert_intermediate_size=32
    )
    return transformers.Qwen3_5MoeForCausalLM(config)


def llava() -> PreTrainedModel:
    """No Qwen: a CLIP tower whose attention has the names of the text model's."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**size, num_hidden_layers=3, vocab_size=640),
        vision_config=transformers.CLIPVisionConfig(**size, num_hidden_layers=5, image_size=28),
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_audio() -> PreTrainedModel:
    config = transformers.Qwen2AudioConfig(
        text_config=transformers.Qwen2Config(**TOKENS, **SMALL),
        audio_config={
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
        },
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


FAMILIES = {
    "qwen2": MODELS["qwen2"],
    "qwen3": MODELS["qwen3"],
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": MODELS["qwen3_5_8l"],
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": MODELS["qwen25vl"],
    "qwen3_5": MODELS["qwen3_5"],
    "qwen3_5_moe": MODELS["qwen3_5_moe"],
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
}
OTHERS = {"llava": llava, "qwen2_audio": qwen2_audio}


def build(name: str) -> PreTrainedModel:
    """Return the model of a family on the meta device."""
    with torch.device("meta"):
        return {**FAMILIES, **OTHERS}[name]()


def wish(**components: Mapping[str, Any]) -> Targets:
    """Read a block as a recipe would hold it."""
    found = settings.read({"targets": components}, "x.yaml").targets
    assert found is not None
    return found
