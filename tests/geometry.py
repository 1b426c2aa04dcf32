"""Published sizes of the models that the shipped recipes name, built on the meta device: no weight exists.

Sizes are those of the models' own config.json and model cards.
"""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

QWEN2_5_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
QWEN2_5_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
}
QWEN3_5_9B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


def qwen2_5(**changes: int) -> Any:
    return transformers.Qwen2Config(**{**QWEN2_5_7B, **changes})


def qwen2_5_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {**QWEN2_5_7B, "rope_parameters": rope}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=dict(QWEN2_5_VISION))


def qwen3_5(tower: tuple[int, int, int] = (27, 1152, 4304), tied: bool = False, **changes: int) -> Any:
    text = {**QWEN3_5_9B, **changes}
    depth, hidden, intermediate = tower
    vision = {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "out_hidden_size": text["hidden_size"],
    }
    return transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)


CONFIGS = {
    "Qwen/Qwen2.5-7B": qwen2_5,
    "Qwen/Qwen2.5-7B-Instruct": qwen2_5,
    "Qwen/Qwen2.5-32B-Instruct": lambda: qwen2_5(
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
    "Qwen/Qwen2.5-72B-Instruct": lambda: qwen2_5(
        hidden_size=8192,
        intermediate_size=29568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": qwen2_5_vl,
    "Qwen/Qwen3.5-4B": lambda: qwen3_5((24, 1024, 4096), True, hidden_size=2560, intermediate_size=9216),
    "Qwen/Qwen3.5-9B": qwen3_5,
    "Qwen/Qwen3.8-27B": lambda: qwen3_5(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        linear_num_value_heads=48,
    ),
    "Qwen/Qwen3.5-35B-A3B": lambda: transformers.Qwen3_5MoeConfig(vision_config={"out_hidden_size": 2048}),
}


def build(name: str) -> PreTrainedModel:
    """Return the model of the published size on the meta device, in bfloat16."""
    config = CONFIGS[name]()
    multimodal = hasattr(config, "vision_config")
    kind = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config, dtype=torch.bfloat16)
    return model
