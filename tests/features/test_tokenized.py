"""Tokenized data: recorded when the host saves it, refused when a run would use it for something else."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llamafactory_ascend import run
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import tokenized
from llamafactory_ascend.settings import Settings
from tests.running import Train

assert torch.__version__  # torch calls the entry point, so that the host below is patched as in a run
from datasets import load_from_disk  # noqa: E402
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer  # noqa: E402
from llamafactory.hparams import DataArguments, ModelArguments  # noqa: E402
from llamafactory.model import load_tokenizer  # noqa: E402
from transformers import Seq2SeqTrainingArguments  # noqa: E402


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    run.current.cache_clear()
    yield
    run.current.cache_clear()


@pytest.fixture
def recipe(assets: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe with a data set, a tokenizer and a path of its own."""
    folder, model = tmp_path / "data", tmp_path / "model"
    folder.mkdir()
    model.mkdir()
    for file in (assets / "qwen3").glob("tokenizer*"):
        (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_bytes((assets / "qwen3" / "config.json").read_bytes())
    (folder / "tiny.json").write_bytes((assets / "data" / "tiny.json").read_bytes())
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
    return {
        "model_name_or_path": str(model),
        "template": "qwen3_nothink",
        "cutoff_len": 48,
        "dataset": "tiny",
        "dataset_dir": str(folder),
        "tokenized_path": str(tmp_path / "tokenized"),
    }


def arguments_of(recipe: dict[str, Any]) -> run.Arguments:
    """The arguments of a run of this recipe, as the host's parser leaves them."""
    recipe = dict(recipe)
    stage = recipe.pop("stage", "sft")
    model = ModelArguments(model_name_or_path=recipe.pop("model_name_or_path"))
    data = DataArguments(**recipe)
    data.packing = stage == "pt" if data.packing is None else data.packing
    training = Seq2SeqTrainingArguments(
        output_dir=str(Path(recipe["dataset_dir"]) / "out"), use_cpu=True, report_to="none"
    )
    now = run.current()
    now.given, now.settings = frozenset(recipe), Settings()
    now.arguments = run.Arguments(model, data, training, SimpleNamespace(stage=stage), None)
    return now.arguments


def by_host(recipe: dict[str, Any]) -> Any:
    """Let the host make or reuse the tokenized data, without the preflight: what stock does."""
    arguments = arguments_of(recipe)
    module = load_tokenizer(arguments.model)
    template = get_template_and_fix_tokenizer(module["tokenizer"], arguments.data)
    stage = arguments.finetuning.stage
    return get_dataset(template, arguments.model, arguments.data, arguments.training, stage, **module)[
        "train_dataset"
    ]


def preflight(recipe: dict[str, Any]) -> list[run.Finding]:
    arguments = arguments_of(recipe)
    return tokenized.ascend_preflight(run.current(), arguments)


def test_another_cutoff_len_is_refused_where_stock_reuses_the_data(recipe: dict[str, Any]) -> None:
    assert preflight(recipe) == []  # nothing there yet
    made = by_host(recipe)
    folder = Path(recipe["tokenized_path"])
    recorded = json.loads((folder / tokenized.SIDECAR).read_text())
    assert recorded["settings"]["cutoff_len"] == 48
    assert {"transformers", "tokenizers", "llamafactory-ascend-plugin"} < set(recorded["versions"])
    assert recorded["data"]["tiny"]["files"]["tiny.json"]["size"] > 0
    assert len(load_from_disk(str(folder))["train"]) == len(made) == 64  # the record is in nobody's way

    assert preflight(recipe) == []
    assert run.current().decisions["tokenized_path"].choice == "reused"

    changed = {**recipe, "cutoff_len": 128, "mask_history": True}
    assert by_host(changed)["input_ids"] == made["input_ids"]  # stock, whatever is asked for
    before = (folder / tokenized.SIDECAR).read_bytes()
    with pytest.raises(AscendError) as refused:
        preflight(changed)
    assert "`cutoff_len`: it was made with 48, now it is 128" in refused.value.what
    assert "`mask_history`: it was made with false, now it is true" in refused.value.what
    assert "template" not in refused.value.what
    assert refused.value.hint == (
        f"`cutoff_len: 48`, `mask_history: false` uses what is there; "
        f"rm -r {folder} has it made again; or name another `tokenized_path`"
    )
    assert (folder / tokenized.SIDECAR).read_bytes() == before


def change_rows(recipe: dict[str, Any]) -> None:
    file = Path(recipe["dataset_dir"]) / "tiny.json"
    file.write_text(file.read_text().replace("quick", "brisk"))


def change_size(recipe: dict[str, Any]) -> None:
    file = Path(recipe["dataset_dir"]) / "tiny.json"
    file.write_text(json.dumps(json.loads(file.read_text())[:60]))


def change_columns(recipe: dict[str, Any]) -> None:
    entry = {"file_name": "tiny.json", "columns": {"prompt": "output", "response": "instruction"}}
    (Path(recipe["dataset_dir"]) / "dataset_info.json").write_text(json.dumps({"tiny": entry}))


def change_tokenizer(recipe: dict[str, Any]) -> None:
    file = Path(recipe["model_name_or_path"]) / "tokenizer.json"
    file.write_text(file.read_text() + " ")


def test_each_change_is_named(recipe: dict[str, Any]) -> None:
    """Data, entry, tokenizer, template, stage, data sets: whatever differs is said, and nothing else."""
    by_host(recipe)
    originals = {
        file: (file.read_bytes(), file.stat().st_mtime_ns)
        for folder in (recipe["dataset_dir"], recipe["model_name_or_path"])
        for file in Path(folder).iterdir()
        if file.is_file()
    }
    for change, said in (
        (change_rows, "dataset tiny, tiny.json`: it was made with other rows of"),
        (change_size, "dataset tiny, tiny.json`: it was made with"),
        (change_columns, "dataset_info.json, tiny`"),
        (change_tokenizer, "tokenizer, tokenizer.json`"),
    ):
        change(recipe)
        with pytest.raises(AscendError) as refused:
            preflight(recipe)
        assert said in refused.value.what and refused.value.what.count("it was made with") == 1
        for file, (data, time) in originals.items():
            file.write_bytes(data)
            os.utime(file, ns=(time, time))
        assert preflight(recipe) == []
    for keys, said in (
        ({"template": "qwen3"}, "`template`: it was made with qwen3_nothink, now it is qwen3"),
        ({"stage": "pt", "packing": False}, "`stage`: it was made with sft, now it is pt"),
        ({"packing": True}, "`packing`: it was made with false, now it is true"),
        ({"default_system": "Be brief."}, "`default_system`: it was made with null, now it is Be brief."),
        ({"max_samples": 10}, "`max_samples`: it was made with null, now it is 10"),
    ):
        with pytest.raises(AscendError) as refused:
            preflight({**recipe, **keys})
        assert said in refused.value.what
        assert "`cutoff_len`" not in refused.value.what  # what the recipe says, though packing takes one off


def test_what_does_not_matter_is_not_refused(recipe: dict[str, Any], tmp_path: Path) -> None:
    """A touched file, a moved model, raw data that is gone: the tokens would be the same."""
    by_host(recipe)
    file = Path(recipe["dataset_dir"]) / "tiny.json"
    os.utime(file)
    assert preflight(recipe) == []
    moved = tmp_path / "moved"
    Path(recipe["model_name_or_path"]).rename(moved)
    assert preflight({**recipe, "model_name_or_path": str(moved)}) == []
    file.unlink()
    assert preflight({**recipe, "model_name_or_path": str(moved)}) == []


def test_data_without_a_record_is_a_warning_and_a_broken_record_an_error(recipe: dict[str, Any]) -> None:
    by_host(recipe)
    sidecar = Path(recipe["tokenized_path"]) / tokenized.SIDECAR
    sidecar.unlink()
    (finding,) = preflight({**recipe, "cutoff_len": 128})
    assert (
        finding.level == "warning" and "does not say which template, cutoff_len and data" in finding.message
    )
    by_host(recipe)  # reused, as stock made it: nobody knows what it is, so nothing is written
    assert not sidecar.exists()
    sidecar.write_text("{")
    with pytest.raises(AscendError, match="cannot be read"):
        preflight(recipe)
    sidecar.write_text('{"format": 2}')
    with pytest.raises(AscendError, match="is not of format 1: another version wrote it"):
        preflight(recipe)


def test_other_versions_are_a_warning(recipe: dict[str, Any]) -> None:
    by_host(recipe)
    sidecar = Path(recipe["tokenized_path"]) / tokenized.SIDECAR
    recorded = json.loads(sidecar.read_text())
    recorded["versions"]["transformers"] = "4.0.0"
    sidecar.write_text(json.dumps(recorded))
    (finding,) = preflight(recipe)
    assert finding.level == "warning" and "transformers 4.0.0" in finding.message


def test_a_training_is_refused_before_its_model_is_loaded(train: Train, tmp_path: Path) -> None:
    """The stock command: one run saves, the next with another cutoff_len ends with what differs."""
    path = tmp_path / "tokenized"
    keys = {"model": "qwen3", "template": "qwen3_nothink", "max_steps": 1, "tokenized_path": str(path)}
    made = train(npu=False, **keys)
    assert made.code == 0, made.text
    assert json.loads((path / tokenized.SIDECAR).read_text())["settings"]["cutoff_len"] == 128
    decision = made.report["decisions"]["tokenized_path"]
    assert tokenized.SIDECAR in json.dumps(decision)
    refused = train(npu=False, **{**keys, "cutoff_len": 64})
    assert refused.code != 0 and "`cutoff_len`: it was made with 128, now it is 64" in refused.text
    assert "Loading checkpoint" not in refused.text and "trainable params" not in refused.text
