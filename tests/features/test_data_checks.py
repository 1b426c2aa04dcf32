"""Data sets before a run: refused by name or by their rows, beside what stock says."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import data_checks
from llamafactory_ascend.run import Run
from llamafactory_ascend.settings import Settings
from tests.running import Train

CASES = Path(__file__).parent.parent / "cases" / "datasets"


def test_training_refuses_beside_stock(train: Train) -> None:
    """Stock has loaded nothing but says neither which row it is nor what is wrong with it."""
    recipe: dict[str, Any] = {"dataset": "mixed_types", "dataset_dir": str(CASES), "npu": False}
    stock = train(plugin=False, **recipe)
    assert stock.code == 1
    assert stock.text.rstrip().endswith(
        "DatasetGenerationError: An error occurred while generating the dataset"
    )
    assert "row 3" not in stock.text
    ours = train(**recipe)
    message = "data set `mixed_types`: row 3: key `output`: a list where a string is expected"
    assert ours.code == 1 and f"[llamafactory-ascend] {message}" in ours.text
    assert "Traceback" not in ours.text and "DatasetGenerationError" not in ours.text
    assert ours.report["explanation"] == message


def judge(
    dataset: str | None, dataset_dir: Path = CASES, settings: Settings | None = None, **changes: Any
) -> tuple[Run, list[tuple[str, str]]]:
    """The preflight alone, with the host's defaults."""
    run = Run(settings=settings or Settings())
    arguments: dict[str, Any] = {
        "dataset": dataset.split(",") if dataset else None,
        "eval_dataset": None,
        "dataset_dir": str(dataset_dir),
        "media_dir": str(dataset_dir),
        "tokenized_path": None,
        "cutoff_len": 2048,
        "packing": None,
        "preprocessing_batch_size": 1000,
        "streaming": False,
        "max_samples": None,
        "eval_on_each_dataset": False,
        "stage": "sft",
        **changes,
    }
    data = SimpleNamespace(**arguments)
    holder = SimpleNamespace(
        data=data,
        training=SimpleNamespace(
            predict_with_generate=changes.get("predict_with_generate", False),
            world_size=changes.get("world_size", 1),
            eval_batch_size=1,
            do_eval=True,
            eval_strategy="no",
            dataloader_drop_last=False,
            accelerator_config=SimpleNamespace(even_batches=False),
        ),
        finetuning=SimpleNamespace(stage=arguments["stage"]),
    )
    findings = data_checks.ascend_preflight(run, holder)  # type: ignore[arg-type]
    return run, [(finding.level, finding.sentence()) for finding in findings]


@pytest.fixture(autouse=True)
def single(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    yield


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("good", []),
        ("bom", ["error"]),
        ("trailing_comma", ["error"]),
        ("empty_output", ["error"]),
        ("role_order", ["error"]),
        ("format_typo", ["error"]),
        ("image_string", ["warning", "error"]),
        ("no_file", ["error"]),
        ("vertical_demo", []),
    ],
)
def test_only_what_would_crash_or_spoil_a_run_stops_it(name: str, levels: list[str]) -> None:
    """`images: "x.png"` is an error of the file, but the host makes a list of it."""
    assert [level for level, _ in judge(name)[1]] == levels


def test_what_was_looked_at_is_decided_and_said() -> None:
    run, _ = judge("good,vertical_demo")
    assert run.decisions["data.good.checked"].choice == "6 rows"
    assert run.decisions["data.good.checked"].reason.startswith("all rows, 0.0 s of at most 20 s")
    assert run.decisions["data.vertical_demo"].reason.startswith("a fragment: ")
    assert run.decisions["data.vertical_demo"].reason.endswith("dataset_info.json:2")


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AscendError, match=r"there is no data set `goood`: did you mean `good`\?"):
        judge("good,goood")


def test_thresholds_come_from_the_settings() -> None:
    _, found = judge("role_order", settings=Settings(data={"dropped": 0.7}))
    assert [level for level, _ in found] == ["warning"]


def test_time_bound(tmp_path: Path) -> None:
    """Reading stops a few rows after the time is over; what was not read is neither good nor missing."""
    row = json.dumps({"instruction": "q", "input": "", "output": "a"})
    last = json.dumps({"instruction": "q", "input": "", "output": "a", "system": "s"})
    (tmp_path / "x.jsonl").write_text(f"{row}\n" * 50_000 + last)
    columns = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
    entry = {"file_name": "x.jsonl", "columns": columns}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"x": entry}))
    run, found = judge("x", tmp_path, Settings(data={"seconds": 0.001}))
    checked = run.decisions["data.x.checked"]
    assert found == [] and 0 < int(checked.choice.split()[0]) < 50_000
    assert checked.reason.startswith("what could be read before the time bound, ")
    run, found = judge("trailing_comma", settings=Settings(data={"seconds": 0}))
    assert found == [] and run.decisions == {}


def test_evaluation_sets_are_compared() -> None:
    _, found = judge(
        "good", eval_dataset=["empty_output"], settings=Settings(data={"empty": 1, "leaked": 0.5})
    )
    level, sentence = found[-1]
    assert level == "error" and sentence.startswith(
        "eval_dataset: 5 of 5 evaluation rows ask what a training row asks"
    )
    _, found = judge(None, eval_dataset=["good"])
    assert found == []


def test_an_evaluation_that_would_hang_is_refused_by_the_rows_that_were_counted() -> None:
    _, found = judge(None, eval_dataset=["good"], world_size=64)
    ((level, sentence),) = found
    assert level == "error" and "64 ranks, batches of 1: with `even_batches: false` some ranks" in sentence


def test_generated_answers_need_none_in_the_rows(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([{"instruction": "q", "input": "", "output": None}]))
    (tmp_path / "dataset_info.json").write_text('{"x": {"file_name": "x.json"}}')
    assert judge(None, tmp_path, eval_dataset=["x"], predict_with_generate=True)[1] == []
    assert judge(None, tmp_path, eval_dataset=["x"])[1][0][0] == "error"


def test_short_corpus_is_refused_before_the_model_is_loaded() -> None:
    _, found = judge("short_corpus", stage="pt")
    assert found[0][0] == "error" and "less than one block of cutoff_len 2048" in found[0][1]
    assert judge("short_corpus", stage="pt", packing=False)[1] == []


def test_one_rank_of_a_node_reads_rows_and_all_look_names_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert judge("bom")[1] == []
    with pytest.raises(AscendError):
        judge("goood")


def test_nothing_is_read_where_the_rows_are_elsewhere(tmp_path: Path) -> None:
    assert judge("x/y", dataset_dir="ONLINE")[1] == []  # type: ignore[arg-type]
    (tmp_path / "tokenized").mkdir()
    (tmp_path / "tokenized" / "dataset_dict.json").touch()
    run, found = judge("bom", tokenized_path=str(tmp_path / "tokenized"))
    assert found == [] and run.decisions["data"].choice == "not checked"


def test_files_of_the_settings_and_their_mistakes(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"theirs": {"file_name": "x.json"}}')
    (tmp_path / "x.json").write_text(json.dumps([{"instruction": "q", "input": "", "output": "a"}]))
    run, found = judge("theirs,good", settings=Settings(dataset_info=[str(tmp_path)]))
    assert found == [] and run.decisions["data.theirs"].choice == str(tmp_path / "x.json")
    with pytest.raises(AscendError, match=r"no/such/dataset_info.json cannot be read: No such file"):
        judge("good", settings=Settings(dataset_info=["no/such/dataset_info.json"]))


def test_shares_are_those_of_the_rows_that_are_used(tmp_path: Path) -> None:
    """Rows behind `max_samples` are read by the host's reader all the same, which stops at another type."""
    good, dropped = {"instruction": "q", "output": "a"}, {"instruction": "q", "output": None}
    rows = [good] * 4 + [dropped] + [good] * 5 + [dropped] * 90
    columns = {"prompt": "instruction", "response": "output"}
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"x": {"file_name": "x.json", "columns": columns}})
    )
    (tmp_path / "x.json").write_text(json.dumps(rows))
    assert judge("x", tmp_path)[1][0][0] == "error", "91 % of all rows"
    run, ((level, said),) = judge("x", tmp_path, max_samples=10)
    assert level == "warning" and "the host keeps 9 and drops 1 of 10 rows" in said
    checked = run.decisions["data.x.checked"]
    assert (checked.choice, "all rows, 90 more behind `max_samples`" in checked.reason) == ("10 rows", True)
    (tmp_path / "x.json").write_text(json.dumps([*rows, {"instruction": "q", "output": ["a"]}]))
    assert "row 100: key `output`: a list" in judge("x", tmp_path, max_samples=10)[1][0][1]


def test_rows_that_are_elsewhere_are_said_not_to_be_checked(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"x": {"hf_hub_url": "a/b"}}')
    run, ((level, said),) = judge("x", tmp_path)
    assert level == "note" and "`hf_hub_url` names no local file: its rows are NOT checked" in said
    assert run.decisions["data.x.checked"].choice == "not checked"
    run, _ = judge("x/y", dataset_dir="ONLINE")  # type: ignore[arg-type]
    assert run.decisions["data"].choice == "not checked"
