"""Shipped recipes: the stock host knows every key, the header is true at the model's published size."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers.modeling_layers import GradientCheckpointingLayer

from llamafactory_ascend import recipe_text, resources, run, settings
from llamafactory_ascend.errors import AscendError
from tests import geometry

TEXTS = {name: file.read_text(encoding="utf-8") for name, file in resources.recipes().items()}
PARSED: dict[str, dict[str, Any]] = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
TRAIN = [name for name, recipe in PARSED.items() if recipe.get("do_train")]
REFERENCE = "qwen3_8_27b_lora_sft_fsdp2"
EXPORT = [name for name in PARSED if name not in TRAIN]
SHARDED = [name for name in TRAIN if "fsdp" in PARSED[name]]
DATA = json.loads((resources.folder("dataset_info") / "dataset_info.json").read_text(encoding="utf-8"))
# Made by `llamafactory-ascend data make` under the name a recipe says; dataset_info is what is shipped.
FOLDERS = {"dataset_info", "data/product_attributes"}


def parse(recipe: dict[str, Any], folder: Path) -> Any:
    """Return the host's five argument objects; an unknown key or value raises ValueError."""
    from llamafactory.hparams import parser
    from transformers import HfArgumentParser

    rest, _block = settings.take({**recipe, "output_dir": str(folder)})
    return HfArgumentParser(parser._TRAIN_ARGS).parse_dict(rest)


def leaves(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if inner is None else [leaf for part in inner for leaf in leaves(part)]


@pytest.mark.parametrize("name", TRAIN)
def test_host_knows_every_key(name: str, tmp_path: Path) -> None:
    recipe = PARSED[name]
    model, data, training, finetuning, _generating = parse(recipe, tmp_path)
    assert training.bf16 and training.gradient_checkpointing and not model.trust_remote_code
    assert (data.template, data.cutoff_len) == (recipe["template"], recipe["cutoff_len"])
    assert training.learning_rate == float(recipe["learning_rate"])
    assert finetuning.finetuning_type == recipe["finetuning_type"]
    settings.read(recipe.get("ascend"), name)
    with pytest.raises(ValueError, match="no_such_key"):
        parse({**recipe, "no_such_key": 1}, tmp_path)


@pytest.mark.parametrize("name", EXPORT)
def test_export_recipe(name: str) -> None:
    from llamafactory.hparams import parser
    from transformers import HfArgumentParser

    model, *_ = HfArgumentParser(parser._INFER_ARGS).parse_dict(PARSED[name])
    assert model.export_dir and model.export_device == "cpu"
    before = PARSED[name]["adapter_name_or_path"].removeprefix("saves/")
    assert {key: PARSED[before][key] for key in ("model_name_or_path", "template")} == {
        key: PARSED[name][key] for key in ("model_name_or_path", "template")
    }


def test_second_step_goes_on_where_the_first_one_ends() -> None:
    first, second = PARSED["qwen2_5_7b_lora_cpt"], PARSED["qwen2_5_7b_lora_sft_after_cpt"]
    assert second["adapter_name_or_path"] == first["output_dir"]
    assert (first["stage"], second["stage"]) == ("pt", "sft")
    for key in ("model_name_or_path", "lora_rank", "lora_target", "finetuning_type"):
        assert first[key] == second[key]


@pytest.mark.parametrize("name", PARSED)
def test_paths_are_relative_and_code_of_strangers_is_not_trusted(name: str) -> None:
    recipe = PARSED[name]
    assert "trust_remote_code" not in recipe
    assert not [leaf for leaf in leaves(recipe) if isinstance(leaf, str) and leaf.startswith(("/", "~"))]
    if name in TRAIN:
        assert recipe["output_dir"] == f"saves/{name}" and recipe["report_to"] == "none"


@pytest.mark.parametrize("name", TRAIN)
def test_template_and_data_exist(name: str) -> None:
    from llamafactory.data.template import TEMPLATES

    recipe = PARSED[name]
    assert recipe["template"] in TEMPLATES and recipe["dataset_dir"] in FOLDERS
    assert recipe["dataset"] in DATA and recipe.get("eval_dataset", recipe["dataset"]) in DATA


@pytest.mark.parametrize("name", PARSED)
def test_header_says_what_a_reader_asks_first(name: str) -> None:
    header = recipe_text.read_header(TEXTS[name])
    assert header.title.endswith(".") and tuple(header.fields) == recipe_text.FIELDS
    model = PARSED[name]["model_name_or_path"].removeprefix("Qwen/")
    assert header.fields["model"].partition(",")[0].split(" with ")[0] == model
    assert "measured" not in header.fields["memory"] or "not been measured" in header.fields["memory"]
    assert f"ascend:{name}" in TEXTS[name] or f"recipes/{name}.yaml" in TEXTS[name]
    assert all(len(line) <= 120 for line in TEXTS[name].splitlines())


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    run.current.cache_clear()
    yield
    run.current.cache_clear()


def adapted(name: str, folder: Path) -> Any:
    """The model at its published size with the adapter that the host puts on it, on the meta device.

    The host is patched as in a run, so that `ascend.targets` holds.
    """
    from llamafactory.model import adapter

    recipe = {key: value for key, value in PARSED[name].items() if key != "adapter_name_or_path"}
    model_args, _data, _training, finetuning, _generating = arguments = parse(recipe, folder)
    model_args.compute_dtype = torch.bfloat16
    now = run.current()
    now.settings, now.arguments = settings.read(recipe.get("ascend"), name), run.Arguments(*arguments)
    model = geometry.build(recipe["model_name_or_path"])
    with torch.device("meta"):
        return adapter.init_adapter(model.config, model, model_args, finetuning, is_trainable=True)


@pytest.mark.parametrize("name", TRAIN)
def test_trainable_parameters_at_the_published_size(name: str, tmp_path: Path) -> None:
    """Counted on the adapter that the host builds, and printed as the recipe's header says."""
    model = adapted(name, tmp_path)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    said = recipe_text.read_header(TEXTS[name]).fields
    assert said["trains"].startswith(f"{trainable:,} of {total:,} parameters (")
    weights = (total - trainable) * 2 / 2**30
    assert f"{weights:.1f} GiB of weights" in said["memory"]
    if name in SHARDED:
        assert f"about {weights / 8:.1f} GiB" in said["memory"]
        counts = Counter(type(module).__name__ for module in model.modules())
        wrapped = PARSED[name]["fsdp_config"]["transformer_layer_cls_to_wrap"]
        assert all(counts[layer] for layer in wrapped)
        blocks = {kind for kind in counts if kind.endswith(("DecoderLayer", "VisionBlock"))}
        assert blocks == set(wrapped), "a kind of layer would stay whole on every card"


def test_the_reference_model_has_the_layers_and_tensors_that_its_run_printed(tmp_path: Path) -> None:
    model = adapted(REFERENCE, tmp_path)
    counts = Counter(type(module).__name__ for module in model.modules())
    assert (counts["Qwen3_5DecoderLayer"], counts["Qwen3_5VisionBlock"]) == (64, 27)
    assert len([p for p in model.parameters() if p.requires_grad]) == 128
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    wrapped = PARSED[REFERENCE]["fsdp_config"]["transformer_layer_cls_to_wrap"]
    assert (len(layers), sum(counts[name] for name in wrapped) + 1) == (91, 92), "with the root"
    assert "91 layers" in TEXTS[REFERENCE] and "92 modules" in TEXTS[REFERENCE]


def test_the_reference_model_takes_the_steps_that_its_run_took() -> None:
    """The batches that accelerate deals out to one of eight ranks, for 6598 rows."""
    recipe = PARSED[REFERENCE]
    batches = BatchSampler(range(6598), recipe["per_device_train_batch_size"], drop_last=False)
    epoch = len(BatchSamplerShard(batches, num_processes=8, process_index=0))
    steps = epoch // recipe["gradient_accumulation_steps"]
    assert (steps, steps * recipe["num_train_epochs"]) == (825, 2475)
    assert (
        "6,598 rows" in TEXTS[REFERENCE] and "825 steps" in TEXTS[REFERENCE] and "2,475" in TEXTS[REFERENCE]
    )


def test_steps_on_questions_about_ascend() -> None:
    name = "qwen2_5_7b_lora_sft_ascend_qa"
    recipe = PARSED[name]
    rows = json.loads((resources.folder("dataset_info") / "ascend_qa.json").read_text(encoding="utf-8"))
    batches = math.ceil(len(rows) / recipe["per_device_train_batch_size"])
    epoch = math.ceil(batches / recipe["gradient_accumulation_steps"])
    said = f"{len(rows)} rows are {epoch} steps an epoch on one card, {epoch * 5} in all"
    assert recipe["num_train_epochs"] == 5 and said in TEXTS[name]
    assert (recipe["lora_rank"], recipe["lora_alpha"], recipe["learning_rate"]) == (8, 16, 2e-4)


def test_the_reference_recipe_keeps_the_best_checkpoint_and_stops(tmp_path: Path) -> None:
    _model, _data, training, finetuning, _generating = parse(PARSED[REFERENCE], tmp_path)
    assert training.load_best_model_at_end and training.metric_for_best_model == "eval_loss"
    assert training.greater_is_better is False and finetuning.early_stopping_steps == 3
    assert (training.eval_strategy, training.eval_steps) == (training.save_strategy, training.save_steps)
    assert training.eval_steps == 100
    variant = parse(PARSED["qwen3_8_27b_lora_deltanet_sft_fsdp2"], tmp_path)
    same = ("load_best_model_at_end", "metric_for_best_model", "eval_steps", "save_total_limit")
    assert [getattr(variant[2], key) for key in same] == [getattr(training, key) for key in same]
    assert variant[3].early_stopping_steps == finetuning.early_stopping_steps


def test_deltanet_is_adapted_without_the_gates_that_vllm_cannot_serve(tmp_path: Path) -> None:
    name = "qwen3_8_27b_lora_deltanet_sft_fsdp2"
    model = adapted(name, tmp_path)
    found = Counter(path.split(".")[-2] for path, _ in model.named_modules() if path.endswith(".lora_A"))
    attention = dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj"], 16)
    assert found == {**attention, **dict.fromkeys(["in_proj_qkv", "in_proj_z", "out_proj"], 48)}
    gates = {
        module.out_features
        for path, module in model.named_modules()
        if path.endswith(("in_proj_a", "in_proj_b"))
    }
    assert gates == {48} and PARSED[name]["lora_rank"] > 48 // 8
    assert "48 wide" in TEXTS[name] and "8 cards that is 6" in TEXTS[name]


def test_recipes_made_for_npus_say_so() -> None:
    made = {name for name in TRAIN if (PARSED[name].get("ascend") or {}).get("device") == "npu"}
    assert made == {name for name in TRAIN if name.startswith(("qwen3_8_27b", "qwen2_5_32b", "qwen2_5_72b"))}
    for name in TRAIN:
        assert ("Made for NPUs" in TEXTS[name]) == (name in made)
        assert ("on CUDA" in TEXTS[name]) == (name not in made)


def test_recipe_by_name() -> None:
    assert resources.recipe("qwen2_5_7b_lora_sft").read_text(encoding="utf-8") == TEXTS["qwen2_5_7b_lora_sft"]
    assert resources.recipe("qwen2_5_7b_lora_sft.yaml") == resources.recipe("qwen2_5_7b_lora_sft")
    with pytest.raises(AscendError, match=r"did you mean `qwen3_8_27b_lora_sft_fsdp2`\?"):
        resources.recipe("qwen3_8_27b_lora_sft")
    with pytest.raises(AscendError, match=r"no recipe `xyz` is shipped\n.*recipes ls"):
        resources.recipe("xyz")


HEADED = """\
# Does a thing,
# on two lines.
#
# model:  one
#         and more
# cards:  1
#
# note: free text
a: 1
"""


def test_header_is_read_over_several_lines_and_ends_with_its_paragraph() -> None:
    header = recipe_text.read_header(HEADED)
    assert header == recipe_text.Header(
        "Does a thing, on two lines.", {"model": "one and more", "cards": "1"}
    )
    assert recipe_text.read_header("a: 1\n") == recipe_text.Header("", {})


RECIPE = """\
# head
a: 1  # first
lora: q,k   # second
rate: 1.0e-4
empty:
flow: {x: 1, y: [1, 2]}
block:
  # inside
  x: 1  # one
  list:
    - p
    - r

# behind the block
last: true
"""


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("a=2", "a: 2  # first"),
        ("lora=q,k,v", "lora: q,k,v   # second"),
        ("rate=5e-5", "rate: 5e-5"),
        ("empty=3", "empty: 3"),
        ("flow.x=7", "flow: {x: 7, y: [1, 2]}"),
        ("flow.z=3", "flow: {x: 1, y: [1, 2], z: 3}"),
        ("flow.z.w=3", "flow: {x: 1, y: [1, 2], z: {w: 3}}"),
        ("flow.y=off", "flow: {x: 1, y: off}"),
        ("flow=[]", "flow: []"),
        ("block.x=on", "  x: on  # one"),
        ("block.list=[s]", "  list: [s]"),
        ("last=", "last: "),
        ("new.inner.key='a, b'", "    key: 'a, b'"),
        ("title=a: b", 'title: {"a": "b"}'),
    ],
)
def test_override_changes_its_own_line_alone(word: str, line: str) -> None:
    text, (change,) = recipe_text.override(RECIPE, [word])
    assert line in text.splitlines()
    key, _, value = word.partition("=")
    expected = yaml.safe_load(RECIPE)
    inner = expected
    for part in key.split(".")[:-1]:
        inner = inner.setdefault(part, {})
    inner[key.split(".")[-1]] = yaml.safe_load(value)
    assert yaml.safe_load(text) == expected and change.key == key
    assert [comment for comment in re.findall("#.*", RECIPE) if comment not in text] == []


def test_override_inside_a_block_lands_behind_its_last_key() -> None:
    text, changes = recipe_text.override(RECIPE, ["block.more=1", "block.more=2", "other.x=1", "other.y=2"])
    assert "    - r\n  more: 2\n\n# behind the block\n" in text
    assert text.endswith("last: true\nother:\n  x: 1\n  y: 2\n")
    assert [(change.before, change.after) for change in changes[:2]] == [(None, "1"), ("1", "2")]
    assert recipe_text.override("a: 1", ["b=2"])[0] == "a: 1\nb: 2\n"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a", "`a` is no override"),
        ("--a=1", "`--a=1` is no override"),
        ("a.x=1", "`a` is 1, no block of keys"),
        ("a=[1", "the value is not YAML"),
    ],
)
def test_broken_override(word: str, message: str) -> None:
    with pytest.raises(AscendError, match=re.escape(message)):
        recipe_text.override(RECIPE, [word])


@pytest.mark.parametrize("name", PARSED)
def test_every_recipe_takes_overrides(name: str) -> None:
    words = [
        "model_name_or_path=models/x",
        "ascend.strict=true",
        "fsdp_config.version=2",
        "learning_rate=1e-3",
    ]
    text, _ = recipe_text.override(TEXTS[name], words)
    found = yaml.safe_load(text)
    assert found["model_name_or_path"] == "models/x" and found["ascend"]["strict"] is True
    assert recipe_text.read_header(text) == recipe_text.read_header(TEXTS[name])
