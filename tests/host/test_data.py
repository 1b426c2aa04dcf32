"""Data sets in the host: fragments over the user's file, media beside them, tokens as the host cuts them."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llamafactory_ascend import resources, run
from llamafactory_ascend.checks.data import catalogue, schema
from llamafactory_ascend.checks.data.check import Request, check
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.host import data
from llamafactory_ascend.settings import Settings

assert torch.__version__  # torch calls the entry point, so that the host below is patched as in a run
from datasets import Dataset  # noqa: E402
from llamafactory.data import converter, loader, parser  # noqa: E402
from llamafactory.data.parser import DatasetAttr  # noqa: E402
from llamafactory.extras.constants import FILEEXT2TYPE, IGNORE_INDEX  # noqa: E402

CASES = Path(__file__).parent.parent / "cases" / "datasets"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    run.current.cache_clear()
    yield
    run.current.cache_clear()


def entry(folder: Path, name: str) -> catalogue.Entry:
    return catalogue.read(catalogue.sources(folder)).find(name)


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    path = entry(folder, name).path
    assert path is not None
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_schema_is_the_hosts() -> None:
    """Every key the host knows, with its default; every file type; every formatting."""
    defaults = {field.name: field.default for field in dataclasses.fields(DatasetAttr)}
    own = {"load_from", "dataset_name"}
    assert {*schema.OPTIONS, *schema.COLUMNS, *schema.TAGS} == set(defaults) - own
    assert {name: defaults[name] for name in (*schema.COLUMNS, *schema.TAGS)} == {
        **schema.COLUMNS,
        **schema.TAGS,
    }
    assert schema.FILE_TYPES == FILEEXT2TYPE
    assert list(schema.FORMATTINGS) == list(converter.DATASET_CONVERTERS)


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({"columns": {"prompt": "q"}}, [{"a": "x"}]),
        ({}, [{"instruction": "q", "output": "a"}]),
        ({"columns": {"prompt": "q", "images": "im"}}, [{"q": "x"}]),
    ],
)
def test_key_that_no_row_has_stops_the_host(keys: dict[str, Any], rows: list[Any], tmp_path: Path) -> None:
    """What is called an error is one: the host raises KeyError for the key that the check names."""
    (tmp_path / "x.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"x": {"file_name": "x.json", **keys}}))
    verdict = check(entry(tmp_path, "x"), Request(stage="pt"))
    (missing,) = [problem.message for problem in verdict.problems if problem.kind == "missing_key"]
    attribute = parser.get_dataset_list(["x"], str(tmp_path))[0]
    convert = converter.get_dataset_converter("alpaca", attribute, SimpleNamespace(media_dir=""))
    with pytest.raises(KeyError) as error:
        Dataset.from_list(rows).map(convert)
    assert f"no row has the key `{error.value.args[0]}`" in missing


@pytest.fixture(scope="module")
def encoder(assets: Path) -> data.Encoder:
    return data.load_encoder(str(assets / "qwen3"), "qwen3_nothink", 64, False, assets / "data")


def cut_by_host(encoder: data.Encoder, of: catalogue.Entry, rows: list[Any], stage: str) -> Any:
    """The host's own conversion and processing of rows, as one batch."""
    attribute = parser.get_dataset_list([of.name], {of.name: of.as_host_reads()})[0]
    convert = converter.get_dataset_converter(attribute.formatting, attribute, encoder.data_args)
    table = {
        key: [row.get(key) for row in rows] for row in rows for key in row
    }  # null where a row has no key
    aligned = [convert({key: table[key][place] for key in table}) for place in range(len(rows))]
    batch = {key: [one[key] for one in aligned] for key in aligned[0]}
    processor = loader._get_dataset_processor(
        encoder.data_args, stage, encoder.template, encoder.tokenizer, encoder.processor
    )
    return processor.preprocess_dataset(batch)


def changed(encoder: data.Encoder, **changes: Any) -> data.Encoder:
    return dataclasses.replace(encoder, data_args=dataclasses.replace(encoder.data_args, **changes))


@pytest.mark.parametrize("mask_history", [False, True])
@pytest.mark.parametrize("cutoff_len", [16, 61, 512, 8192])
@pytest.mark.parametrize("name", ["long_answer", "long_first_turn", "role_order"])
def test_tokens_are_those_of_the_hosts_batches(
    encoder: data.Encoder, name: str, cutoff_len: int, mask_history: bool
) -> None:
    """Length of every row and number of trained tokens, whatever is cut."""
    of, rows = entry(CASES, name), rows_of(CASES, name)[:1] if name == "role_order" else rows_of(CASES, name)
    using = changed(encoder, cutoff_len=cutoff_len, mask_history=mask_history)
    batch = cut_by_host(using, of, rows, "sft")
    counted = list(data.token_counts(enumerate(rows), of, using))
    assert [row.kept for row in counted] == [len(ids) for ids in batch["input_ids"]]
    trained = [sum(label != IGNORE_INDEX for label in labels) for labels in batch["labels"]]
    assert [sum(turn.response_kept for turn in row.trained) for row in counted] == trained


@pytest.mark.parametrize("cutoff_len", [24, 64])
def test_final_end_token_and_preferences_are_counted_too(
    assets: Path, encoder: data.Encoder, cutoff_len: int
) -> None:
    """A template with one end token for all turns, pairs of answers, and answers with a label."""
    folder = assets / "data"
    tiny = rows_of(folder, "tiny")
    saving = data.load_encoder(str(assets / "qwen3"), "llama2", cutoff_len, False, folder)
    saving = dataclasses.replace(saving, template=dataclasses.replace(saving.template, efficient_eos=True))
    counted = list(data.token_counts(enumerate(tiny), entry(folder, "tiny"), saving))
    batch = cut_by_host(saving, entry(folder, "tiny"), tiny, "sft")
    assert [row.kept for row in counted] == [len(ids) for ids in batch["input_ids"]]
    using = changed(encoder, cutoff_len=cutoff_len)
    for name, stage, keys in (
        ("tiny_dpo", "rm", ("chosen_input_ids", "rejected_input_ids")),
        ("tiny_kto", "kto", ("input_ids",)),
    ):
        rows = rows_of(folder, name)
        batch = cut_by_host(using, entry(folder, name), rows, stage)
        counted = list(data.token_counts(enumerate(rows), entry(folder, name), using, stage))
        longest = [max(len(batch[key][place]) for key in keys) for place in range(len(rows))]
        assert [row.kept for row in counted] == longest


def test_pictures_are_counted(assets: Path) -> None:
    """A picture takes as many tokens as the processor makes of it, here 6."""
    folder = assets / "data"
    using = data.load_encoder(str(assets / "qwen25vl"), "qwen2_vl", 40, False, folder)
    of, rows = entry(folder, "tiny_mm"), rows_of(folder, "tiny_mm")
    batch = cut_by_host(using, of, rows, "sft")
    counted = list(data.token_counts(enumerate(rows), of, using))
    assert [row.kept for row in counted] == [len(ids) for ids in batch["input_ids"]]
    image = using.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert batch["input_ids"][0].count(image) == 6 and counted[0].lost > 0


def test_texts_of_stage_pt_are_counted(assets: Path, encoder: data.Encoder) -> None:
    """In blocks of one token the host makes as many blocks as there are tokens."""
    of, rows = entry(assets / "data", "tiny_pt"), rows_of(assets / "data", "tiny_pt")
    using = changed(encoder, cutoff_len=2, packing=True)  # the host takes one off where it packs
    batch = cut_by_host(using, of, rows, "pt")
    counted = data.token_counts(enumerate(rows), of, encoder, "pt")
    assert sum(turn.prompt for row in counted for turn in row.turns) == len(batch["input_ids"])


def test_names_are_read_as_utf8_and_fragments_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock reads one file, in the encoding of the locale; here a Chinese name, a fragment, a shipped set."""
    extra = tmp_path / "extra"
    (extra / "pictures").mkdir(parents=True)
    (extra / "pictures" / "a.png").touch()
    rows = [{"instruction": "<image>?", "output": "a", "im": ["pictures/a.png"]}]
    (extra / "rows.json").write_text(json.dumps(rows))
    columns = {"prompt": "instruction", "response": "output", "images": "im"}
    (extra / "dataset_info.json").write_text(
        json.dumps({"theirs": {"file_name": "rows.json", "columns": columns}})
    )
    mine = tmp_path / "data"
    mine.mkdir()
    (mine / "我.json").write_text(json.dumps([{"instruction": "q", "input": "", "output": "a"}]))
    info = json.dumps({"我的数据": {"file_name": "我.json"}}, ensure_ascii=False)
    (mine / "dataset_info.json").write_text(info, encoding="utf-8")
    before = (mine / "dataset_info.json").read_bytes()
    now = run.current()
    now.settings = Settings(dataset_info=[str(extra)])
    names = ["我的数据", "theirs", "vertical_demo_eval"]
    found = parser.get_dataset_list(names, str(mine))
    assert [attribute.dataset_name for attribute in found] == [
        "我.json",
        str(extra / "rows.json"),
        str(Path(str(resources.folder("dataset_info"))) / "vertical_demo_eval.json"),
    ]
    data_args = SimpleNamespace(
        dataset_dir=str(mine), media_dir=str(mine), streaming=False, max_samples=None, overwrite_cache=True,
        preprocessing_num_workers=None,
    )  # fmt: skip
    model_args = SimpleNamespace(cache_dir=str(tmp_path / "cache"), hf_hub_token=None)
    training_args = SimpleNamespace(local_process_index=0, dataloader_num_workers=0)
    loaded = [
        loader._load_single_dataset(attribute, model_args, data_args, training_args) for attribute in found
    ]
    assert [len(one) for one in loaded] == [1, 1, 12]
    assert loaded[1][0]["_images"] == [str(extra / "pictures" / "a.png")]
    assert data_args.media_dir == str(mine), "the run's own is untouched"
    assert (mine / "dataset_info.json").read_bytes() == before


def test_only_fragments_need_no_file_of_the_user(tmp_path: Path) -> None:
    assert len(parser.get_dataset_list(["vertical_demo"], str(tmp_path))) == 1
    with pytest.raises(AscendError, match="did you mean `vertical_demo`"):
        parser.get_dataset_list(["vertical_demos"], str(tmp_path))


def test_hubs_and_dicts_stay_the_hosts() -> None:
    assert parser.get_dataset_list(["vertical_demo"], "ONLINE")[0].load_from == "hf_hub"
    assert parser.get_dataset_list(["x"], {"x": {"file_name": "f"}})[0].dataset_name == "f"
    with pytest.raises(ValueError, match="Undefined dataset vertical_demo"):
        parser.get_dataset_list(["vertical_demo"], {})
