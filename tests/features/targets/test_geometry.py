"""Trainable parameters of the sizes that people train, on the meta device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, OFTConfig, PeftConfig, get_peft_model

from llamafactory_ascend.features.targets.adapted import Adapted
from llamafactory_ascend.features.targets.selection import exact, select
from llamafactory_ascend.features.targets.summary import section, table
from tests.features.targets.families import wish
from tests.geometry import CONFIGS

VL, HYBRID = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3.8-27B"
QKVO = {"modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
VISION = {"modules": ["attn.qkv", "attn.proj"]}


def lora(rank: int) -> Callable[[Any], PeftConfig]:
    return lambda modules: LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules)


def oft(block: int) -> Callable[[Any], PeftConfig]:
    return lambda modules: OFTConfig(r=0, oft_block_size=block, target_modules=modules)


@pytest.mark.parametrize(
    ("name", "method", "components", "modules", "trainable", "total"),
    [
        (VL, lora(32), {"text": QKVO}, {"text": 112}, {"text": 28 * 32 * 2 * (7168 + 4096)}, 8_312_351_744),
        (
            VL,
            lora(32),
            {"text": QKVO, "vision": {**VISION, "blocks": "last:6"}},
            {"text": 112, "vision": 12},
            {"text": 20_185_088, "vision": 6 * 32 * (1280 + 3840 + 1280 + 1280)},
            8_313_826_304,
        ),
        # each layer: 1280 / 32 rotations of 32 x 31 / 2 angles
        (VL, oft(32), {"vision": VISION}, {"vision": 64}, {"vision": 64 * 40 * 496}, 8_293_436_416),
        (HYBRID, lora(8), {"text": QKVO}, {"text": 64}, {"text": 5_242_880}, 27_361_971_440),
    ],
)
def test_trainable_parameters(
    name: str, method: Any, components: Any, modules: Any, trainable: Any, total: int
) -> None:
    config = CONFIGS[name]()
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
        selection = select(model, wish(**components))
        model = get_peft_model(model, method(exact(selection.names, model)))
    adapted = Adapted.of(model)
    found = section("ascend.targets", {match.label: match.modules for match in selection.matches}, adapted)
    print(table(found))
    assert list(adapted.modules) == list(selection.names)
    assert found["modules"] == modules
    assert found["trainable"] == trainable
    assert (sum(trainable.values()), total) == model.get_nb_trainable_parameters()
    assert found["parameters"] == total
