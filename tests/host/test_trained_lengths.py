"""The lengths of the rows that are trained on: in the report as `data stats` counts them, in bounded time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

assert torch.__version__
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer  # noqa: E402
from llamafactory.extras.constants import IGNORE_INDEX  # noqa: E402
from llamafactory.hparams import DataArguments, ModelArguments  # noqa: E402
from llamafactory.model import load_tokenizer  # noqa: E402
from transformers import Seq2SeqTrainingArguments  # noqa: E402

from llamafactory_ascend import run  # noqa: E402
from llamafactory_ascend.features import trained_lengths as section  # noqa: E402
from llamafactory_ascend.host import trained_lengths  # noqa: E402
from llamafactory_ascend.report.table import KNOWN  # noqa: E402


def prepare(assets: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """The host's training rows of `tiny,long`, and what the report says about them."""
    model_args = ModelArguments(str(assets / "qwen3"), cache_dir=str(folder / "cache"))
    data_args = DataArguments(
        template="qwen3_nothink",
        dataset="tiny,long",
        dataset_dir=str(assets / "data"),
        cutoff_len=60,
        max_samples=40,
        val_size=6,
    )
    training_args = Seq2SeqTrainingArguments(str(folder), do_train=True, use_cpu=True, report_to="none")
    now = run.Run()
    now.arguments = SimpleNamespace(data=data_args)  # type: ignore[assignment]
    monkeypatch.setattr(run, "current", lambda: now)
    module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(module["tokenizer"], data_args)
    made = get_dataset(template, model_args, data_args, training_args, "sft", **module)
    return made["train_dataset"], section.ascend_report_sections(now)


def test_section_describes_the_rows_that_are_trained_on(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 of tiny and all 16 of long, less six for evaluation: long rows have some thousand tokens."""
    rows, found = prepare(assets, tmp_path, monkeypatch)
    lengths = found["lengths"]
    assert (lengths["rows"], lengths["counted"], lengths["cutoff_len"]) == (50, 50, 60)
    kept = [label != IGNORE_INDEX for row in rows["labels"] for label in row]
    assert (lengths["tokens_kept"], lengths["supervised"]["kept"]) == (len(kept), sum(kept))
    assert lengths["supervised"]["lost"] > 5_000 and lengths["percentiles"]["max"] > 1_000
    assert lengths["over_cutoff"] >= sum(bin["rows"] for bin in lengths["histogram"] if bin["first"] > 60) > 0
    assert sum(bin["rows"] for bin in lengths["histogram"]) == 50

    ((_, line),) = KNOWN["lengths"][1](lengths)
    assert line.startswith("50 rows, mean ") and line.endswith(" % of the tokens that are trained on")

    monkeypatch.setattr(trained_lengths, "SECONDS", 0)
    _, found = prepare(assets, tmp_path, monkeypatch)
    assert (found["lengths"]["rows"], found["lengths"]["counted"]) == (50, 1), "a part, and it says so"


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 100, 1_000])
def test_a_part_is_from_all_over_the_set(rows: int) -> None:
    order = list(trained_lengths.spread(rows))
    assert sorted(order) == list(range(rows))
    if rows >= 100:
        tenths = {number * 10 // rows for number in order[:20]}
        assert tenths == set(range(10))
