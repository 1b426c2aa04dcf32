"""Rows out of .json and .jsonl, however large the file is and wherever it breaks off."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamafactory_ascend.checks.data import json_rows
from llamafactory_ascend.checks.data.json_rows import Row
from llamafactory_ascend.checks.data.problem import Problem

VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def read(file: Path, content: str | bytes) -> tuple[list[Any], list[str]]:
    """Return the values of the rows and the messages of the problems."""
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    items = list(json_rows.read(file))
    rows = [item for item in items if isinstance(item, Row)]
    return [row.value for row in rows], [item.message for item in items if isinstance(item, Problem)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    rows=st.lists(VALUE, min_size=1, max_size=5), indent=st.sampled_from([None, 1]), chunk=st.integers(1, 9)
)
def test_array_is_read_in_pieces_of_any_size(
    rows: list[Any], indent: int | None, chunk: int, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "CHUNK", chunk)
        text = json.dumps(rows, ensure_ascii=False, indent=indent)
        # a lone surrogate is no UTF-8, so JSON can hold it in escapes alone
        text = text if text.isascii() or _encodes(text) else json.dumps(rows, indent=indent)
        assert read(tmp_path / "x.json", text) == (rows, [])


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('{"a": 1}\n\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        ('{"a": 1}{"a": 2}', [{"a": 1}, {"a": 2}]),
        ('{\n "a": 1\n}\n{\n "a": 2\n}', [{"a": 1}, {"a": 2}]),
        ('{"a": "x\ty"}', [{"a": "x\ty"}]),
        ("[]", []),
        ('\ufeff{"a": 1}\n{"a": 2}', [{"a": 1}, {"a": 2}]),
    ],
)
def test_what_the_host_reads_is_read(text: str, rows: list[Any], tmp_path: Path) -> None:
    """Each was loaded with `datasets` too, which raises for none of them but the empty array."""
    assert read(tmp_path / "x.json", text) == (rows, [])


@pytest.mark.parametrize(
    ("text", "rows", "message"),
    [
        ('{"a": 1}\n{"a": 2},\n{"a": 3}\n', 2, ':2:9: a comma follows the row: `{"a": 2},`'),
        ('[{"a": 1},\n{"a": 2,}]', 1, ':2:9: a comma stands before `}`: `{"a": 2,}]`'),
        ('[{"a": 1},\n]', 1, ":2:1: a comma stands before `]`: `]`"),
        ('[{"a": 1}\n{"a": 2}]', 1, ':2:1: `,` expected: `{"a": 2}]`'),
        ('[{"a": 1},\n {"a": "no end', 1, ':2:2: unterminated string starting at: ` {"a": "no end`'),
        ('[{"a": 1}', 1, ':1:10: the file ends where `,` is expected: `[{"a": 1}`'),
        ('[{"a": 1}] x', 1, ':1:12: something follows the end of the array: `[{"a": 1}] x`'),
        ("", 0, " is empty"),
    ],
)
def test_broken_place_is_shown(text: str, rows: int, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    values, messages = read(file, text)
    assert messages == [f"{file}{message}"]
    assert len(values) == rows


def test_place_is_right_far_behind_the_first_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line and column count what is no longer held; a long line is shown around the column alone."""
    monkeypatch.setattr(json_rows, "CHUNK", 64)
    good = ",\n".join(['{"a": "' + "x" * 200 + '"}'] * 50)
    file = tmp_path / "x.json"
    _, (message,) = read(file, f"[{good},\n  {{'a': 1}}]")
    assert message == (f"{file}:51:4: expecting property name enclosed in double quotes: `  {{'a': 1}}]`")
    _, (message,) = read(file, "[" + good.replace(",\n", ", ") + " oops]")
    column = len(good) + 3
    assert message.startswith(f"{file}:1:{column}: `,` expected: `...") and message.endswith('xxx"} oops]`')


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """12 MB of rows of 1 kB: an array is held a piece at a time, lines one at a time."""
    row = json.dumps({"a": "x" * 1000})
    for name, text in (("x.json", f"[{', '.join([row] * 12_000)}]"), ("x.jsonl", f"{row}\n" * 12_000)):
        file = tmp_path / name
        file.write_text(text)
        tracemalloc.start()
        assert sum(isinstance(item, Row) for item in json_rows.read(file)) == 12_000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 6 * json_rows.CHUNK, (name, peak)
