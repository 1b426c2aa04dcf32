"""Encodings are recognised, and the command that is printed really converts the file."""

import subprocess
from pathlib import Path

import pytest

from llamafactory_ascend.checks.data import encodings, json_rows
from llamafactory_ascend.checks.data.json_rows import Row
from llamafactory_ascend.checks.data.problem import Problem

TEXT = '[{"instruction": "请用一句话解释术语。", "output": "这是示例。"}]'


@pytest.mark.parametrize(
    ("codec", "name"),
    [
        ("utf-8-sig", "UTF-8 with a byte order mark"),
        ("gbk", "GBK"),
        ("gb18030", "GBK"),
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16 without a byte order mark"),
        ("utf-16-be", "UTF-16 without a byte order mark"),
        ("utf-32", "UTF-32"),
    ],
)
def test_command_converts_the_file(codec: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "has a blank.json"
    file.write_bytes(TEXT.encode(codec))
    (problem,) = json_rows.read(file)
    assert isinstance(problem, Problem)
    assert f" is {name}, it must be plain UTF-8" in problem.message and str(file) in problem.message
    subprocess.run(problem.next, shell=True, check=True)  # noqa: S602 - the command is what is tested
    assert file.read_text(encoding="utf-8") == TEXT
    assert [isinstance(item, Row) for item in json_rows.read(file)] == [True]


def test_line_of_another_encoding_in_the_middle(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes('{"a": "甲"}\n'.encode() + '{"a": "请用一句话解释"}\n'.encode("gbk"))
    row, problem = json_rows.read(file)
    assert isinstance(row, Row) and isinstance(problem, Problem)
    assert problem.message == f"{file}:2 is GBK, it must be plain UTF-8"


def test_bytes_that_are_nothing() -> None:
    assert encodings.guess(b'{"a": "\xff\xfe\xfa"}') is None
    assert encodings.guess("Zürich, café, naïve".encode("latin-1")) is None
