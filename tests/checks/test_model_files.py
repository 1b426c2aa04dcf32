"""A model's folder that cannot be trained is named before it is loaded."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from llamafactory_ascend.checks.model_files import is_missing, problems


@pytest.fixture
def model(assets: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(assets / "qwen3", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_a_whole_model_and_one_of_the_hub(model: Path) -> None:
    assert problems(model) == problems(Path("Qwen/Qwen3-8B")) == []


def test_a_broken_file_is_named(model: Path) -> None:
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text[: len(text) // 2])
    (problem,) = problems(model)
    assert problem.startswith(f"{model}/config.json is not JSON: ") and "line" in problem


def test_a_tokenizer_that_is_missing(model: Path) -> None:
    for file in model.glob("*token*"):
        file.unlink()
    stock = AutoTokenizer.from_pretrained(model)  # and trains on what it makes of the rows
    assert len(stock) == 1 and stock("four words of text")["input_ids"] == []
    (problem,) = problems(model)
    assert problem.startswith(f"{model} holds no tokenizer")
    (model / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["a.B", null]}}')
    assert problems(model) == []  # its own code may read other files


def test_a_file_that_is_not_read_may_be_broken(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / "notes.json").write_text("{", encoding="utf-8")
    assert problems(tmp_path) == []
    (tmp_path / "model.safetensors.index.json").write_text("{", encoding="utf-8")
    (problem,) = problems(tmp_path)
    assert problem.startswith(f"{tmp_path}/model.safetensors.index.json is not JSON")


def test_a_path_is_told_from_a_name_on_a_hub(tmp_path: Path) -> None:
    assert is_missing("./nope") and is_missing("/nowhere/m") and is_missing("a/b/c")
    assert not is_missing("Qwen/Qwen3-8B") and not is_missing(str(tmp_path))
