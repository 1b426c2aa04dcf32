"""Shipped recipes: the stock host knows every key, and the header says what a reader asks first."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamafactory_ascend import resources

RECIPES = resources.recipes()


def parse(recipe: dict[str, Any], folder: Path) -> Any:
    """Return the host's five argument objects; an unknown key or value raises ValueError."""
    from llamafactory.hparams import parser
    from transformers import HfArgumentParser

    return HfArgumentParser(parser._TRAIN_ARGS).parse_dict({**recipe, "output_dir": str(folder)})


@pytest.mark.parametrize("name", RECIPES)
def test_stock_host_knows_every_key(name: str, tmp_path: Path) -> None:
    recipe = yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))
    model, data, training, finetuning, _generating = parse(recipe, tmp_path)
    assert training.bf16 and training.fsdp_config["version"] == 2
    assert (finetuning.lora_rank, finetuning.lora_alpha, finetuning.lora_dropout) == (8, 16, 0.05)
    assert finetuning.lora_target == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (data.template, data.cutoff_len) == ("qwen3_vl_nothink", 4096)
    assert model.model_name_or_path == recipe["model_name_or_path"]
    with pytest.raises(ValueError, match="no_such_key"):
        parse({**recipe, "no_such_key": 1}, tmp_path)


@pytest.mark.parametrize("name", RECIPES)
def test_template_data_and_layer_names_exist(name: str) -> None:
    from llamafactory.data.template import TEMPLATES
    from transformers.models.qwen3_5 import modeling_qwen3_5

    recipe = yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))
    assert recipe["template"] in TEMPLATES
    info = json.loads((resources.folder("dataset_info") / "dataset_info.json").read_text(encoding="utf-8"))
    assert {recipe["dataset"], recipe["eval_dataset"]} <= set(info)
    for layer in recipe["fsdp_config"]["transformer_layer_cls_to_wrap"]:
        assert hasattr(modeling_qwen3_5, layer)


@pytest.mark.parametrize("name", RECIPES)
def test_header_says_model_cards_memory_and_source(name: str) -> None:
    header = re.match(r"(#.*\n)+", RECIPES[name].read_text(encoding="utf-8"))
    assert header is not None
    assert all(f"# {word}" in header[0] for word in ("model:", "cards:", "memory:", "source:"))
