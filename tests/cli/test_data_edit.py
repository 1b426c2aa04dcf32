"""``data ls``, ``data add`` and ``data remove``: what is there is kept, and nothing is half done."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from llamafactory_ascend import resources
from llamafactory_ascend.cli import app

INFO = '{\n    "mine": {"file_name": "mine.json"},\n    "甲": {"file_name": "mine.json"}\n}\n'


def data(*words: str) -> Result:
    return CliRunner().invoke(app, ["data", *words])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    made.mkdir()
    (made / "dataset_info.json").write_text(INFO, encoding="utf-8")
    (made / "mine.json").write_text("[]")
    return made


def test_shipped_set_is_added_once(folder: Path) -> None:
    info, shipped = folder / "dataset_info.json", Path(str(resources.folder("dataset_info")))
    result = data("add", "vertical_demo", "--dataset-dir", str(folder))
    assert (result.exit_code, result.stdout) == (
        0,
        f"vertical_demo: added\ncopied {folder / 'vertical_demo.json'}\n",
    )
    text = info.read_text(encoding="utf-8")
    entry = json.loads((shipped / "dataset_info.json").read_text(encoding="utf-8"))["vertical_demo"]
    assert text.startswith(INFO.removesuffix("\n}\n")), "order and layout stay"
    assert json.loads(text) == {**json.loads(INFO), "vertical_demo": entry}
    assert (folder / "dataset_info.json.bak").read_text(encoding="utf-8") == INFO
    assert (folder / "vertical_demo.json").read_bytes() == (shipped / "vertical_demo.json").read_bytes()
    before = sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir())
    again = data("add", "vertical_demo", "--dataset-dir", str(folder))
    assert (again.exit_code, again.stdout) == (0, "vertical_demo: there already\n")
    assert sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir()) == before
    assert data("check", "vertical_demo", "--dataset-dir", str(folder)).exit_code == 0
    removed = data("remove", "vertical_demo", "--dataset-dir", str(folder))
    assert removed.stdout == f"vertical_demo: removed from {info}\n{folder / 'vertical_demo.json'} stays\n"
    assert info.read_text(encoding="utf-8") == INFO


def test_pictures_that_are_not_copied_are_spoken_of(folder: Path, tmp_path: Path) -> None:
    said = data("add", "product_attributes", "--dataset-dir", str(folder)).stdout
    assert "product_attributes: images are not copied, its entry says: " in said
    assert "llamafactory-ascend data make product_attributes DIR; `media_dir: DIR` names their folder" in said
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    entry = {"file_name": "v.json", "formatting": "sharegpt", "columns": {"messages": "m", "videos": "v"}}
    (theirs / "dataset_info.json").write_text(json.dumps({"v": entry}))
    (theirs / "v.json").write_text("[]")
    said = data("add", str(theirs), "--dataset-dir", str(folder)).stdout
    assert f"v: videos are not copied, they lie in {theirs}; " in said


def test_folder_without_anything(tmp_path: Path) -> None:
    result = data("add", "vertical_demo_eval", "--dataset-dir", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    assert list(json.loads((tmp_path / "new" / "dataset_info.json").read_text())) == ["vertical_demo_eval"]
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == [
        "dataset_info.json",
        "vertical_demo_eval.json",
    ]


def test_whole_file_of_somebody_else(folder: Path, tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    (extra / "rows").mkdir(parents=True)
    (extra / "rows" / "a.jsonl").write_text('{"instruction": "q", "input": "", "output": "a"}\n')
    entries = {"a": {"file_name": "rows/a.jsonl"}, "b": {"hf_hub_url": "x/y"}}
    (extra / "dataset_info.json").write_text(json.dumps(entries))
    result = data("add", str(extra / "dataset_info.json"), "--dataset-dir", str(folder))
    assert (result.exit_code, result.stdout) == (0, f"a: added\nb: added\ncopied {folder}/rows/a.jsonl\n")
    assert list(json.loads((folder / "dataset_info.json").read_text())) == ["mine", "甲", "a", "b"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"mine": {"file_name": "other.json"}}, "another data set is called `mine`; nothing was written"),
        ({"x": {"file_name": "mine.json"}}, "mine.json is another file than"),
        ({"x": {"file_name": "../mine.json"}}, "`x` names a file outside its own folder"),
        ({"x": {"file_name": "no.json"}}, "the file of `x` does not exist"),
    ],
)
def test_nothing_is_written(entries: dict[str, Any], said: str, folder: Path, tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    extra.mkdir()
    for name in ("mine.json", "other.json"):
        (extra / name).write_text('[{"other": 1}]')
    (extra / "dataset_info.json").write_text(json.dumps(entries))
    result = data("add", str(extra), "--dataset-dir", str(folder))
    assert result.exit_code == 2 and said in result.stderr, result.output
    assert sorted(file.name for file in folder.iterdir()) == ["dataset_info.json", "mine.json"]
    assert (folder / "dataset_info.json").read_text(encoding="utf-8") == INFO
    assert (folder / "mine.json").read_text() == "[]"


def test_names_that_are_not_there(folder: Path) -> None:
    result = data("add", "vertical_demos", "--dataset-dir", str(folder))
    assert result.exit_code == 2 and "did you mean `vertical_demo`" in result.stderr
    result = data("remove", "mein", "--dataset-dir", str(folder))
    assert result.exit_code == 2 and "did you mean `mine`?" in result.stderr
    assert not (folder / "dataset_info.json.bak").exists()


def test_list_says_where_everything_comes_from(folder: Path, tmp_path: Path) -> None:
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "dataset_info.json").write_text(
        json.dumps({"mine": {"file_name": "no.json"}, "u": {"hf_hub_url": "x/y"}})
    )
    words = ("ls", "--dataset-dir", str(folder), "--dataset-info", str(extra))
    listed = json.loads(data(*words, "--json").stdout)
    twice = "two data sets are called `mine`"
    shown = [(one["name"], one["origin"], one["rows"], one["data"], one["remark"]) for one in listed]
    assert shown[:4] == [
        ("mine", "dataset_dir", 0, f"{folder}/mine.json", twice),
        ("mine", "ascend.dataset_info", None, f"{extra}/no.json", twice),
        ("甲", "dataset_dir", 0, f"{folder}/mine.json", ""),
        ("u", "ascend.dataset_info", None, "x/y", ""),
    ]
    shipped = {one["name"]: one["rows"] for one in listed if one["origin"] == "shipped"}
    entries = json.loads((Path(str(resources.folder("dataset_info"))) / "dataset_info.json").read_text())
    assert list(shipped) == list(entries) and shipped["vertical_demo_eval"] == 12
    table = data(*words).stdout
    assert "vertical_cpt_demo" in table and "ascend.dataset_info" in table
