"""Shipped data sets as data: their rows and sources, and what a set that is not shipped says of itself."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from llamafactory_ascend import resources
from llamafactory_ascend.checks.data.check import Request, check
from llamafactory_ascend.checks.data.leaks import Leaks
from llamafactory_ascend.checks.data.problem import Limits
from llamafactory_ascend.cli import app
from llamafactory_ascend.features import data_checks

SHIPPED = Path(str(resources.folder("dataset_info")))
SOURCE = re.compile(r"https?://\S+|github\.com/[\w.-]+/[\w.-]+: \S+|llamafactory 0\.9\.5: \S+\.py|PyTorch 2")
TALK = [
    {"role": "system", "content": "你是一位耐心的倾听者。"},
    {"role": "user", "content": "最近总是睡不好。"},
    {"role": "assistant", "content": "听起来这段时间不轻松。从什么时候开始的？"},
    {"role": "user", "content": "换工作以后。"},
    {"role": "assistant", "content": "新的环境让你夜里也放不下，是吗？"},
]


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((SHIPPED / f"{name}.json").read_text(encoding="utf-8"))
    return found


def data(*words: str) -> Result:
    return CliRunner().invoke(app, ["data", *words])


@pytest.mark.parametrize(("name", "least"), [("ascend_qa", 60), ("ascend_qa_eval", 8)])
def test_questions_about_ascend_have_an_answer_and_a_source_each(name: str, least: int) -> None:
    found = rows(name)
    assert len(found) >= least
    assert len({row["instruction"] for row in found}) == len(found) == len({row["output"] for row in found})
    for row in found:
        assert set(row) == {"instruction", "input", "output", "source"} and row["input"] == ""
        assert 8 <= len(row["instruction"]) <= 120 and 15 <= len(row["output"]) <= 400, row
        assert row["instruction"][-1] in "？?" and row["output"][-1] in "。.", row
        assert all(SOURCE.search(part) for part in row["source"].split(" ; ")), row
    english = sum(row["instruction"].isascii() for row in found)
    assert 1 <= english <= len(found) / 4


def test_most_sources_are_of_those_who_make_the_software() -> None:
    makers = (
        "hiascend.com",
        "docs.vllm.ai",
        "github.com/",
        "mindspore.cn",
        "gitcode.com/Ascend",
        "llamafactory",
    )
    found = [row["source"] for row in rows("ascend_qa")]
    others = [source for source in found if not any(maker in source for maker in makers)]
    assert len(others) <= 0.15 * len(found), others


def test_no_question_of_the_evaluation_is_trained_on() -> None:
    catalogue = data_checks.catalogue(SHIPPED)
    leaks = Leaks(Limits(leaked=0.0))
    for name, evaluation in (("ascend_qa_eval", True), ("ascend_qa", False)):
        verdict = check(catalogue.find(name), Request(), leaks, evaluation)
        assert verdict.complete and verdict.kept == verdict.rows == len(rows(name)) and not verdict.problems
    assert leaks.problems() == []


def test_plain_texts_are_those_of_three_domains() -> None:
    entry = data_checks.catalogue(SHIPPED).find("vertical_cpt_demo")
    verdict = check(entry, Request(stage="pt", cutoff_len=512))
    assert (verdict.rows, verdict.kept, verdict.problems) == (90, 90, ())
    texts = [row[entry.keys["columns"]["prompt"]] for row in rows("vertical_demo")]
    ends = [next(word for word in ("办事部门", "医生", "法律") if word in text[-30:]) for text in texts]
    assert {word: ends.count(word) for word in ends} == {"办事部门": 30, "医生": 30, "法律": 30}


def test_the_long_row_fills_a_batch_with_4096_tokens(assets: Path) -> None:
    """The host's own loading, cutting and collating; a text in a real vocabulary is long enough too."""
    from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_dataset
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments, ModelArguments
    from llamafactory.model.loader import load_tokenizer
    from transformers import Seq2SeqTrainingArguments

    (row,) = rows("long_demo")
    questions = [demo["instruction"] for demo in rows("vertical_demo")]
    assert all(question in row["output"] for question in questions)
    assert len(row["output"]) > 3 * 4096, "a token of Chinese is one to two characters long"
    model = ModelArguments(model_name_or_path=str(assets / "qwen3_5"))
    arguments = DataArguments(
        dataset="long_demo", dataset_dir=str(SHIPPED), template="qwen3_vl_nothink", cutoff_len=4096
    )
    training = Seq2SeqTrainingArguments(output_dir="unused", use_cpu=True, do_train=True, report_to="none")
    loaded = load_tokenizer(model)
    template = get_template_and_fix_tokenizer(loaded["tokenizer"], arguments)
    encoded = get_dataset(template, model, arguments, training, stage="sft", **loaded)["train_dataset"]
    assert [len(one["input_ids"]) for one in encoded] == [4096] * 8
    collate = SFTDataCollatorWith4DAttentionMask(template=template, pad_to_multiple_of=8, **loaded)
    batch = collate([encoded[0]])
    width = batch["input_ids"].shape[1]
    assert width == 4104, "with a placeholder picture, which is masked"
    assert batch["attention_mask"].nonzero()[:, 1].tolist() == list(range(4096))
    assert (batch["labels"] != -100).sum() > 4000


def test_a_set_that_is_not_shipped_says_where_its_file_goes(tmp_path: Path) -> None:
    assert not (SHIPPED / "soulchat_r1.json").exists()
    entry = data_checks.catalogue(tmp_path).find("soulchat_r1")
    (problem,) = check(entry, Request()).problems
    assert (problem.level, problem.kind) == ("error", "no_file")
    place = "Put it into your dataset_dir as soulchat_r1.json, then: llamafactory-ascend data add soulchat_r1"
    assert place in problem.next and "soulchat_r1.json does not exist" in problem.message
    refused = data("add", "soulchat_r1", "--dataset-dir", str(tmp_path))
    assert refused.exit_code == 2 and place in refused.stderr and list(tmp_path.iterdir()) == []


def test_its_own_copy_is_registered_and_keeps_system_prompt_and_history(tmp_path: Path) -> None:
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import get_dataset_list
    from llamafactory.hparams import DataArguments

    own = tmp_path / "soulchat_r1.json"
    own.write_text(json.dumps([{"messages": TALK}]), encoding="utf-8")
    added = data("add", "soulchat_r1", "--dataset-dir", str(tmp_path))
    assert added.exit_code == 0 and added.stdout == "soulchat_r1: added\n"
    entry = data_checks.catalogue(tmp_path).find("soulchat_r1")
    assert entry.source.origin == "yours" and entry.path == own
    verdict = check(entry, Request())
    assert (verdict.rows, verdict.kept, verdict.problems) == (1, 1, ())
    (attribute,) = get_dataset_list(["soulchat_r1"], str(tmp_path))
    arguments = DataArguments(dataset_dir=str(tmp_path))
    row = get_dataset_converter(attribute.formatting, attribute, arguments)({"messages": TALK})
    assert row["_system"] == TALK[0]["content"]
    assert [turn["content"] for turn in row["_prompt"]] == [turn["content"] for turn in TALK[1:4]]
    assert [turn["content"] for turn in row["_response"]] == [TALK[4]["content"]]
