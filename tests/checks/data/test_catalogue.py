"""Names: the user's, fragments over them, names that exist twice or not at all, files that climb out."""

import json
from pathlib import Path
from typing import Any

import pytest

from llamafactory_ascend.checks.data import catalogue, info_text
from llamafactory_ascend.checks.data.catalogue import Catalogue, Source
from llamafactory_ascend.errors import AscendError


def write(folder: Path, **entries: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "dataset_info.json"
    file.write_text(json.dumps(entries, ensure_ascii=False, indent=2), encoding="utf-8")
    return file


def read(tmp_path: Path, **others: Any) -> Catalogue:
    return catalogue.read(catalogue.sources(tmp_path / "data", **others))


def test_fragments_lie_over_the_users_own(tmp_path: Path) -> None:
    write(tmp_path / "data", 我的={"file_name": "mine.json"})
    extra = write(tmp_path / "extra", theirs={"file_name": "../rows/x.json"})
    found = read(tmp_path, settings=[extra.parent, extra])
    assert found.find("我的").as_host_reads() == {"file_name": "mine.json"}, "the host joins it itself"
    entry = found.find("theirs")
    assert entry.as_host_reads() == {"file_name": str(tmp_path / "rows" / "x.json")}, "the user may climb"
    assert (entry.place, len(found.sources)) == (f"{extra}:2", 2)


def test_no_file_of_the_users_own(tmp_path: Path) -> None:
    extra = write(tmp_path / "extra", theirs={"file_name": "x.json"})
    found = read(tmp_path, plugins=[extra])
    assert found.find("theirs").path == extra.parent / "x.json"
    with pytest.raises(AscendError, match=f"{tmp_path}/data/dataset_info.json does not exist"):
        found.find("mine")


def test_name_that_exists_twice(tmp_path: Path) -> None:
    mine = write(tmp_path / "data", a={}, x={"file_name": "x.json"})
    theirs = write(tmp_path / "extra", x={"file_name": "x.json"})
    with pytest.raises(AscendError) as error:
        read(tmp_path, plugins=[theirs]).find("x")
    assert error.value.what == f"two data sets are called `x`:\n  {mine}:3\n  {theirs}:2"
    assert read(tmp_path, plugins=[theirs]).find("a").name == "a", "who does not name it is not stopped"
    assert read(tmp_path, shipped=theirs).find("x").source.file == mine, "`data make` writes shipped names"


def test_name_that_stands_twice_in_one_file(tmp_path: Path) -> None:
    file = write(tmp_path / "data")
    file.write_text('{\n"x": {"file_name": "a"},\n"x": {"file_name": "b"}\n}')
    with pytest.raises(AscendError) as error:
        read(tmp_path).find("x")
    assert error.value.what.endswith(f"\n  {file}:2\n  {file}:3")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("goood", "there is no data set `goood`: did you mean `good`?"),
        ("good.json", "did you mean `good`? A data set is named without its file's ending"),
        ("rows.jsonl", "did you mean `bad`? A data set is named without its file's ending"),
        ("zzz.csv", "A data set is named without its file's ending and needs an entry in dataset_info.json"),
    ],
)
def test_unknown_names(name: str, said: str, tmp_path: Path) -> None:
    write(tmp_path / "data", good={"file_name": "g.json"}, bad={"file_name": "rows.jsonl"})
    with pytest.raises(AscendError) as error:
        read(tmp_path).find(name)
    assert said in error.value.what


@pytest.mark.parametrize("name", ["../x.json", "a/../../x.json", "/etc/x.json"])
def test_installed_fragment_that_climbs_out_is_refused(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "extra", x={"file_name": name})
    for others in ({"plugins": [file]}, {"shipped": file}):
        with pytest.raises(AscendError, match="`x` names a file outside its own folder"):
            read(tmp_path, **others).find("x")
    assert read(tmp_path, settings=[file]).find("x")


def test_broken_file_of_a_plugin_is_a_warning_and_one_of_the_users_an_error(tmp_path: Path) -> None:
    write(tmp_path / "data", a={})
    broken = tmp_path / "extra" / "dataset_info.json"
    broken.parent.mkdir()
    broken.write_text('{\n  "b": {},\n}')
    found = read(tmp_path, plugins=[broken])
    assert found.warnings == [f"{broken}:3:1: a comma stands before `}}`: `}}`"]
    assert found.find("a")
    with pytest.raises(AscendError, match=":3:1: a comma stands before"):
        read(tmp_path, settings=[broken])


@pytest.mark.parametrize(("codec", "name"), [("gbk", "GBK"), ("utf-16", "UTF-16")])
def test_encodings_of_the_file_itself(codec: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes('{"我的数据": {"file_name": "例子.json"}}'.encode(codec))
    with pytest.raises(AscendError, match=f"is {name}, it must be plain UTF-8"):
        catalogue.read_source(Source(file, "yours"))
    file.write_bytes('{"我的数据": {}}'.encode("utf-8-sig"))
    assert catalogue.read_source(Source(file, "yours"))[0].name == "我的数据"


LAYOUTS = [
    '{\n  "a": {\n    "file_name": "a.json"\n  }\n}\n',
    '{\n\t"a": {"file_name": "a.json"},\n\t"b": {"file_name": "b.json"}\n}',
    '{"a": {"file_name": "a.json"}}',
    '{\r\n    "a": {"file_name": "a.json"}\r\n}\r\n',
    "{}",
    "{\n}\n",
]


@pytest.mark.parametrize("text", LAYOUTS)
def test_entry_goes_in_and_out_and_nothing_else_changes(text: str) -> None:
    keys = {"file_name": "新.json", "columns": {"prompt": "q"}}
    added = info_text.add(text, "new", keys)
    assert json.loads(added) == {**json.loads(text), "new": keys}
    assert list(json.loads(added))[-1] == "new"
    assert ("\r\n" in text) == ("\r\n" in added) and "新" in added
    removed = info_text.remove(added, "new")
    assert removed == text if json.loads(text) else json.loads(removed) == {}


def test_new_entry_is_written_like_the_others() -> None:
    keys = {"file_name": "b.json"}
    assert info_text.add(LAYOUTS[0], "b", keys) == (
        '{\n  "a": {\n    "file_name": "a.json"\n  },\n  "b": {\n    "file_name": "b.json"\n  }\n}\n'
    )
    assert info_text.add(LAYOUTS[3], "b", keys).endswith(',\r\n    "b": {"file_name": "b.json"}\r\n}\r\n')
    assert info_text.add("", "b", keys) == '{\n  "b": {\n    "file_name": "b.json"\n  }\n}\n'


def test_first_and_middle_entries_go_too() -> None:
    text = '{\n  "a": 1,\n  "b": 2,\n  "c": 3\n}'
    assert info_text.remove(text, "a") == '{\n  "b": 2,\n  "c": 3\n}'
    assert info_text.remove(text, "b") == '{\n  "a": 1,\n  "c": 3\n}'
    with pytest.raises(KeyError):
        info_text.remove(text, "d")
