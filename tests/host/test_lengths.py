"""Lengths as the host's own preprocessing makes them: every figure beside what its data sets hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llamafactory_ascend.checks.data import catalogue
from llamafactory_ascend.checks.lengths import steps
from llamafactory_ascend.checks.lengths.totals import Totals
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.host import lengths

assert torch.__version__
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer  # noqa: E402
from llamafactory.extras.constants import IGNORE_INDEX  # noqa: E402
from llamafactory.hparams import DataArguments, ModelArguments  # noqa: E402
from llamafactory.model import load_tokenizer  # noqa: E402
from transformers import Seq2SeqTrainingArguments  # noqa: E402

BATCH = 20  # rows that the host's processor is given at once: several batches, the last one not full
TURNS = [
    {"role": "user" if place % 2 == 0 else "assistant", "content": f"{'the quick brown fox ' * size}"}
    for place, size in enumerate((2, 9, 3, 1, 8, 12))
]


@pytest.fixture(scope="module")
def folder(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data sets of the tests, and `chat`: three turns, one row in a wrong order."""
    made = tmp_path_factory.mktemp("data")
    for file in (assets / "data").iterdir():
        (made / file.name).symlink_to(file)
    rows = [{"messages": TURNS[: 2 * count]} for count in (1, 2, 3, 3)] + [{"messages": TURNS[1:3]}]
    (made / "chat.json").write_text(json.dumps(rows))
    info = json.loads((assets / "data" / "dataset_info.json").read_text())
    chat = {**info["tiny_mm"], "file_name": "chat.json", "columns": {"messages": "messages"}}
    (made / "dataset_info.json").unlink()
    (made / "dataset_info.json").write_text(json.dumps({**info, "chat": chat}))
    return made


def by_host(recipe: dict[str, Any], stage: str, output: Path) -> Any:
    """The host's training rows, as `run_sft` and the others ask for them."""
    model_args = ModelArguments(
        model_name_or_path=recipe["model_name_or_path"], cache_dir=str(output / "cache")
    )
    keys = {key: value for key, value in recipe.items() if key != "model_name_or_path"}
    data_args = DataArguments(**keys)
    data_args.packing = stage == "pt" if data_args.packing is None else data_args.packing
    training_args = Seq2SeqTrainingArguments(output_dir=str(output), use_cpu=True, report_to="none")
    module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(module["tokenizer"], data_args)
    return get_dataset(template, model_args, data_args, training_args, stage, **module)["train_dataset"]


def counted(recipe: dict[str, Any], stage: str) -> Totals:
    """The same rows, counted."""
    encoder = lengths.load(recipe, stage)
    found = catalogue.read(catalogue.sources(Path(recipe["dataset_dir"])))
    entries = [found.find(name) for name in encoder.data_args.dataset]
    counter, totals = lengths.BatchCounter(entries, encoder, stage), Totals()
    items = []
    for of, entry in enumerate(entries):
        assert entry.path is not None
        rows = json.loads(entry.path.read_text())
        items += [(of, number, row) for number, row in enumerate(rows)]
    for start in range(0, len(items), BATCH):
        totals.merge(counter(items[start : start + BATCH]))
    assert totals.failed == 0, totals.examples
    return totals


def labels(rows: Any) -> int:
    return sum(label != IGNORE_INDEX for row in rows["labels"] for label in row)


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", "sft", {"dataset": "tiny,long", "template": "qwen3_nothink", "cutoff_len": 48}),
    ("qwen3", "sft", {"dataset": "chat,tiny", "template": "qwen3_nothink", "cutoff_len": 90}),
    ("qwen3", "sft", {"dataset": "chat", "template": "qwen3", "cutoff_len": 90, "mask_history": True}),
    ("qwen3", "sft", {"dataset": "chat", "template": "qwen", "cutoff_len": 300, "train_on_prompt": True}),
    ("qwen3", "sft", {"dataset": "chat", "template": "breeze", "cutoff_len": 120}),
    ("qwen25vl", "sft", {"dataset": "tiny_mm,tiny", "template": "qwen2_vl", "cutoff_len": 40}),
    ("qwen3", "rm", {"dataset": "tiny_dpo", "template": "qwen3_nothink", "cutoff_len": 40}),
    ("qwen3", "kto", {"dataset": "tiny_kto", "template": "qwen3_nothink", "cutoff_len": 40}),
    ("qwen3", "pt", {"dataset": "tiny_pt", "cutoff_len": 100}),
    ("qwen3", "pt", {"dataset": "tiny_pt", "cutoff_len": 30, "packing": False}),
    ("qwen3", "sft", {"dataset": "tiny,chat", "template": "qwen3", "cutoff_len": 128, "packing": True}),
    ("qwen3", "sft", {"dataset": "tiny", "template": "qwen3", "cutoff_len": 128, "neat_packing": True}),
]


@pytest.mark.parametrize(("model", "stage", "keys"), CASES)
def test_figures_are_those_of_the_hosts_data_set(
    model: str, stage: str, keys: dict[str, Any], assets: Path, folder: Path, tmp_path: Path
) -> None:
    recipe = {
        "model_name_or_path": str(assets / model),
        "dataset_dir": str(folder),
        "preprocessing_batch_size": BATCH,
        **keys,
    }
    rows, totals = by_host(recipe, stage, tmp_path), counted(recipe, stage)
    assert totals.dropped == ("chat" in keys["dataset"])
    if stage in ("rm", "kto"):
        names = ("chosen_input_ids", "rejected_input_ids") if stage == "rm" else ("input_ids",)
        longest = [max(len(row[name]) for name in names) for row in rows]
        assert (totals.kept, totals.lengths.kept) == (len(rows), sum(longest))
        return
    tokens = sum(len(ids) for ids in rows["input_ids"])
    if keys.get("packing", stage == "pt") or keys.get("neat_packing"):
        room = keys["cutoff_len"] - (stage == "sft")
        assert totals.blocks == len(rows) > 1
        assert tokens == totals.blocks * (room + (stage == "sft"))  # a packed sequence of sft is padded
        assert totals.tail == totals.lengths.kept - totals.packed
        if stage == "sft":
            assert labels(rows) == totals.supervised.kept and not totals.tail
        else:
            assert totals.packed == tokens and totals.tail > 0
        return
    assert (totals.kept, totals.lengths.kept) == (len(rows), tokens)
    if stage == "sft":
        assert totals.supervised.kept == labels(rows)
    if stage == "pt":
        end = load_tokenizer(ModelArguments(model_name_or_path=str(assets / model)))["tokenizer"].eos_token_id
        assert totals.ends.kept == sum(ids[-1] == end for ids in rows["input_ids"]) > 0


@pytest.mark.parametrize("template", ["qwen3_nothink", "qwen2_vl"])
def test_ends_and_pictures_are_counted_in_what_is_kept(
    template: str, assets: Path, folder: Path, tmp_path: Path
) -> None:
    """An answer has its end where the last label is the end token's line break; pictures are cut with it."""
    recipe = {
        "model_name_or_path": str(assets / ("qwen25vl" if template == "qwen2_vl" else "qwen3")),
        "dataset_dir": str(folder),
        "dataset": "tiny_mm" if template == "qwen2_vl" else "tiny",
        "template": template,
        "cutoff_len": 60 if template == "qwen3_nothink" else 16,
        "preprocessing_batch_size": BATCH,
    }
    rows, totals = by_host(recipe, "sft", tmp_path), counted(recipe, "sft")
    tokenizer = lengths.load(recipe, "sft").tokenizer
    end = tokenizer("<|im_end|>\n", add_special_tokens=False)["input_ids"]
    ends = sum(row[-len(end) :] == end for row in rows["labels"])
    assert totals.ends.kept == ends and totals.ends.total == len(rows)
    if template == "qwen2_vl":
        pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        kept = sum(ids.count(pad) for ids in rows["input_ids"])
        assert (totals.media["image"].total, totals.media["image"].kept) == (96, kept) and kept < 96
    else:
        assert 0 < ends < len(rows)


def test_cutoff_len_that_keeps_everything_does(assets: Path, folder: Path) -> None:
    """With the length that is named for all rows the host cuts nothing, with one less it cuts one."""
    recipe = {
        "model_name_or_path": str(assets / "qwen3"),
        "dataset_dir": str(folder),
        "dataset": "tiny,chat",
        "template": "qwen3_nothink",
        "cutoff_len": 32,
    }
    enough = counted(recipe, "sft").needed.percentile(1)
    assert counted({**recipe, "cutoff_len": enough}, "sft").over == 0
    assert counted({**recipe, "cutoff_len": enough - 1}, "sft").over > 0
    totals = counted({**recipe, "cutoff_len": 90}, "sft")
    assert sorted(totals.turns) == [1, 2, 3] and totals.turns[3].rows == 2
    assert totals.turns[1].kept > 0 and totals.turns[3].kept < totals.turns[3].total


def test_a_row_that_cannot_be_encoded_is_counted_and_named(assets: Path, folder: Path) -> None:
    recipe = {
        "model_name_or_path": str(assets / "qwen25vl"),
        "dataset_dir": str(folder),
        "dataset": "tiny_mm",
        "template": "qwen2_vl",
    }
    encoder = lengths.load(recipe, "sft")
    entry = catalogue.read(catalogue.sources(folder)).find("tiny_mm")
    rows = json.loads((folder / "tiny_mm.json").read_text())[:3]
    rows[1]["images"] = ["nowhere.png"]
    totals = lengths.BatchCounter([entry], encoder, "sft")([(0, at, row) for at, row in enumerate(rows)])
    assert (totals.kept, totals.failed, totals.rows) == (2, 1, 3)
    assert totals.examples[0].startswith("tiny_mm row 1: FileNotFoundError: ")


def test_what_the_host_refuses_is_said_in_one_line(assets: Path) -> None:
    recipe = {"model_name_or_path": str(assets / "qwen3"), "template": "none_such", "dataset": "x"}
    with pytest.raises(AscendError, match="template none_such: Template none_such does not exist"):
        lengths.load(recipe, "sft")
    with pytest.raises(AscendError, match="the recipe: `cutoff_len` is 'many', it must be a whole number"):
        lengths.load({**recipe, "cutoff_len": "many"}, "sft")
    with pytest.raises(AscendError, match="`per_device_train_batch_size` is 0"):
        steps.steps(8, {"per_device_train_batch_size": 0}, 1)


def test_a_folder_without_a_tokenizer_is_refused(assets: Path, tmp_path: Path) -> None:
    """Transformers makes an empty one of the configuration alone, and every row would be two tokens."""
    (tmp_path / "config.json").write_bytes((assets / "qwen3" / "config.json").read_bytes())
    recipe = {"model_name_or_path": str(tmp_path), "template": "qwen3_nothink", "dataset": "x"}
    with pytest.raises(AscendError, match="holds no tokenizer"):
        lengths.load(recipe, "sft")
