"""Tiny models of the Qwen families with random weights, saved as the hub would hold them.

| name | what it is | parameters |
| --- | --- | --- |
| qwen3, qwen3b | dense text, 4 and 8 layers | 0.2 M, 8.2 M |
| qwen2 | dense text of the older family, 4 layers | 0.2 M |
| qwen3_5 | DeltaNet / attention hybrid, 4 layers, vision tower of 2 blocks | 0.5 M |
| qwen3_5_bf16 | the same in bfloat16 | 0.5 M |
| qwen3_5_8l | the hybrid as a text-only `Qwen3_5ForCausalLM`, 8 layers | 0.5 M |
| qwen3_5_big | the hybrid with 16 layers and 6 vision blocks, bfloat16 | 15 M |
| qwen3_5_moe | the hybrid with 4 experts, 2 used for each token | 0.5 M |
| qwen25vl, vlm | vision-language, 4 + 2 and 8 + 8 layers; vlm in bfloat16 | 0.5 M, 15 M |
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from .tokenizer import SPECIAL_TOKENS, make_tokenizer

Settings = dict[str, Any]
# token ids are places in SPECIAL_TOKENS, so no tokenizer is needed to write a config
TOKENS: Settings = {
    "vocab_size": 640,
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
    "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
}
VISION_TOKENS: Settings = {
    "image_token_id": SPECIAL_TOKENS.index("<|image_pad|>"),
    "video_token_id": SPECIAL_TOKENS.index("<|video_pad|>"),
    "vision_start_token_id": SPECIAL_TOKENS.index("<|vision_start|>"),
    "vision_end_token_id": SPECIAL_TOKENS.index("<|vision_end|>"),
}
SMALL: Settings = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
HYBRID: Settings = {
    **SMALL,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
HYBRID_BIG: Settings = {
    **HYBRID,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
VISION: Settings = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 14,
}
HYBRID_VISION: Settings = {**VISION, "spatial_merge_size": 2, "num_position_embeddings": 64}


def make_qwen3() -> PreTrainedModel:
    config = transformers.Qwen3Config(**TOKENS, **SMALL, head_dim=16, tie_word_embeddings=False)
    return transformers.Qwen3ForCausalLM(config)


def make_qwen3b() -> PreTrainedModel:
    size = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    config = transformers.Qwen3Config(**TOKENS, **{**SMALL, **size}, head_dim=32, tie_word_embeddings=False)
    return transformers.Qwen3ForCausalLM(config)


def make_qwen2() -> PreTrainedModel:
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**TOKENS, **SMALL, tie_word_embeddings=False)
    )


def make_qwen3_5() -> PreTrainedModel:
    config = transformers.Qwen3_5Config(
        text_config={**TOKENS, **HYBRID}, vision_config=dict(HYBRID_VISION), **VISION_TOKENS
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def make_qwen3_5_bf16() -> PreTrainedModel:
    return make_qwen3_5().bfloat16()


def make_qwen3_5_8l() -> PreTrainedModel:
    config = transformers.Qwen3_5TextConfig(**TOKENS, **{**HYBRID, "num_hidden_layers": 8})
    return transformers.Qwen3_5ForCausalLM(config)


def make_qwen3_5_big() -> PreTrainedModel:
    vision = {"depth": 6, "hidden_size": 128, "intermediate_size": 256, "out_hidden_size": 256}
    config = transformers.Qwen3_5Config(
        text_config={**TOKENS, **HYBRID_BIG}, vision_config={**HYBRID_VISION, **vision}, **VISION_TOKENS
    )
    return transformers.Qwen3_5ForConditionalGeneration(config).bfloat16()


def make_qwen3_5_moe() -> PreTrainedModel:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    text = {key: value for key, value in HYBRID.items() if key != "intermediate_size"}
    config = transformers.Qwen3_5MoeConfig(
        text_config={**TOKENS, **text, **experts}, vision_config=dict(HYBRID_VISION), **VISION_TOKENS
    )
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


def make_qwen25vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TOKENS, **SMALL, "rope_parameters": rope},
        vision_config={**VISION, "fullatt_block_indexes": [1], "window_size": 56},
        **VISION_TOKENS,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def make_vlm() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    size = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8}
    vision = {
        "depth": 8,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_heads": 8,
        "out_hidden_size": 256,
        "fullatt_block_indexes": [3, 7],
        "window_size": 112,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TOKENS, **SMALL, **size, "rope_parameters": rope},
        vision_config={**VISION, **vision},
        **VISION_TOKENS,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config).bfloat16()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": make_qwen3,
    "qwen3b": make_qwen3b,
    "qwen3_5": make_qwen3_5,
    "qwen25vl": make_qwen25vl,
    "qwen3_5_big": make_qwen3_5_big,
    "vlm": make_vlm,
    "qwen2": make_qwen2,
    "qwen3_5_bf16": make_qwen3_5_bf16,
    "qwen3_5_8l": make_qwen3_5_8l,
    "qwen3_5_moe": make_qwen3_5_moe,
}
# These four draw their weights from one random stream, in this order; each of the others has its own.
ONE_STREAM = ("qwen3", "qwen3b", "qwen3_5", "qwen25vl")
# Image tokens at most. The text-only hybrid needs a processor too: the host's Qwen3.5 template asks for one.
LARGEST_IMAGE = {
    "qwen3_5": 16,
    "qwen3_5_bf16": 16,
    "qwen3_5_8l": 16,
    "qwen3_5_big": 16,
    "qwen3_5_moe": 16,
    "qwen25vl": 16,
    "vlm": 1024,
}


def write_models(root: Path, names: Collection[str]) -> None:
    """Save the named models of `MODELS`, each with tokenizer and processor, as folders of `root`."""
    with torch.random.fork_rng(devices=[]):
        if not set(names).isdisjoint(ONE_STREAM):
            torch.manual_seed(0)
            for name in ONE_STREAM:  # all of them, wanted or not: each moves the stream for the next
                model = MODELS[name]()
                if name in names:
                    _save(root / name, model)
        for name in names:
            if name not in ONE_STREAM:
                torch.manual_seed(0)
                _save(root / name, MODELS[name]())


def _save(folder: Path, model: PreTrainedModel) -> None:
    tokenizer = make_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if folder.name in LARGEST_IMAGE:
        _make_processor(folder.name, tokenizer).save_pretrained(folder)


def _make_processor(name: str, tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    """An image becomes at most `LARGEST_IMAGE[name]` tokens, each of 28 x 28 pixels."""
    pixels = 28 * 28
    image = Qwen2VLImageProcessor(patch_size=14, min_pixels=pixels, max_pixels=pixels * LARGEST_IMAGE[name])
    if name in ("qwen25vl", "vlm"):
        return transformers.Qwen2_5_VLProcessor(
            image_processor=image,
            tokenizer=tokenizer,
            video_processor=Qwen2VLVideoProcessor(patch_size=14),
        )
    return transformers.Qwen3VLProcessor(
        image_processor=image,
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=14),
    )
