"""``llamafactory-ascend data check``: every case that breaks stock, and what is said instead."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from llamafactory_ascend.cli import app, data_progress
from tests.running import BIN, environment

CASES = Path(__file__).parent.parent / "cases" / "datasets"


def check(*words: str, folder: Path = CASES) -> Result:
    return CliRunner().invoke(app, ["data", "check", *words, "--dataset-dir", str(folder)])


FOUND = [
    ("good", 0, ["6 rows, 6 kept", "nothing to say"]),
    ("bom", 2, ["bom.json is UTF-8 with a byte order mark", r"next: sed -i '1s/^\xEF\xBB\xBF//' "]),
    ("gbk", 2, ["gbk.json:1 is GBK", "next: iconv -f GB18030 -t UTF-8 "]),
    ("utf16", 2, ["utf16.json is UTF-16", "next: iconv -f UTF-16 -t UTF-8 "]),
    (
        "trailing_comma",
        2,
        ["trailing_comma.jsonl:3:71: a comma follows the row", '第2号术语是示例含义。"},`'],
    ),
    ("mixed_types", 2, ["row 3: key `output`: a list where a string is expected"]),
    (
        "empty_output",
        2,
        [
            "2 of 6 rows are empty",
            "row 1: `output` is empty: the row trains on the end token alone",
            "row 4: the question (`instruction` and `input`) is empty",
            "33 % is above `ascend.data.empty: 0.1`",
        ],
    ),
    (
        "role_order",
        2,
        [
            "the host keeps 1 and drops 2 of 3 rows",
            "row 1: `assistant` speaks where a question (`user`) is due",
            "row 2: `user` speaks where an answer (`assistant`) is due",
            "67 % is above `ascend.data.dropped: 0.1`",
        ],
    ),
    ("format_typo", 2, ["unknown key `format`", "did you mean `formatting`?"]),
    (
        "tags_mismatch",
        2,
        [
            "found roles `human` and `gpt`, expected `user` and `assistant`",
            '"tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human", '
            '"assistant_tag": "gpt"}',
        ],
    ),
    ("partial_columns", 2, ["`columns` names no `messages`"]),
    ("image_string", 2, ["row 0: `images` is a string, must be a list"]),
    (
        "image_missing",
        2,
        [
            f"file not found: neither {CASES}/no/such/file.png nor {Path.cwd()}/no/such/file.png exists",
            "row 1: one image and no `<image>`",
        ],
    ),
    ("no_file", 2, [f"file {CASES}/does_not_exist.json does not exist", "nearest: "]),
    ("climbs_out", 2, ["`file_name` leads out of", "an installed fragment would be refused for it"]),
    ("goood", 2, ["there is no data set `goood`: did you mean `good`?"]),
    ("good.json", 2, ["did you mean `good`?", "A data set is named without its file's ending"]),
]


@pytest.mark.parametrize(("name", "code", "fragments"), FOUND, ids=[name for name, _, _ in FOUND])
def test_case(name: str, code: int, fragments: list[str]) -> None:
    result = check(name)
    assert result.exit_code == code, result.output
    assert [fragment for fragment in fragments if fragment not in result.stdout] == [], result.stdout


TOKENS = [
    (
        "long_answer",
        64,
        [],
        "cutoff_len 64 cuts off 99 % of the tokens of all answers (5,398 of 5,477), end tokens with them: "
        "rows 0, 1 and 2: the answer loses its end",
        "`cutoff_len: 12631` keeps 95 % of the rows whole, `12631` all",
    ),
    (
        "long_answer",
        512,
        [],
        "cutoff_len 512 cuts off 95 % of the tokens of all answers (5,192 of 5,477), end tokens with them: "
        "row 0: the answer loses its end",
        "`cutoff_len: 12631` keeps 95 % of the rows whole, `12631` all",
    ),
    (
        "long_first_turn",
        512,
        [],
        "cutoff_len 512 cuts off 17 % of the tokens of all answers (17 of 100), end tokens with them: "
        "row 0: turn 2 of 2 vanishes",
        "`cutoff_len: 6371` keeps 95 % of the rows whole, `6371` all; `mask_history: true` keeps the last "
        "turn, and trains on it alone",
    ),
    ("long_first_turn", 512, ["--mask-history"], None, None),
    (
        "short_corpus",
        2048,
        ["--stage", "pt"],
        "44 tokens in 2 rows are less than one block of cutoff_len 2048: packing drops the tail, "
        "which is everything",
        "`cutoff_len: 32` works, and `packing: false` does; better, add texts",
    ),
]


@pytest.mark.parametrize(("name", "cutoff_len", "words", "message", "following"), TOKENS)
def test_case_in_tokens(
    assets: Path, name: str, cutoff_len: int, words: list[str], message: str | None, following: str | None
) -> None:
    """The share that is cut, the rows, the `cutoff_len` that keeps them; with the host's own template."""
    tokenizer = ["--model", str(assets / "qwen3"), "--template", "qwen3_nothink"]
    result = check(name, *tokenizer, "--cutoff-len", str(cutoff_len), *words, "--json")
    problems = json.loads(result.stdout)["sets"][0]["problems"]
    assert [(one["message"], one["next"]) for one in problems] == ([(message, following)] if message else [])
    assert result.exit_code == (0 if not message else 2 if name == "short_corpus" else 1)
    if name == "long_answer":
        fitting = ["--cutoff-len", re.findall(r"\d+", following or "")[0]]
        assert check(name, *tokenizer, *fitting).exit_code == 0, "the length that it names is enough"


def test_row_that_the_host_cannot_encode_is_named(assets: Path) -> None:
    """A template for text alone, and rows with pictures: a training would stop at the first of them."""
    tokenizer = ["--model", str(assets / "qwen3"), "--template", "qwen3_nothink"]
    result = check("tiny_mm", *tokenizer, folder=assets / "data")
    assert result.exit_code == 2
    assert "rows 0, 1, 2, 3, 4 and 11 more: no tokens can be made of it: ValueError: " in result.stdout
    assert "does not support image input" in result.stdout


def test_short_corpus_is_seen_without_a_tokenizer() -> None:
    """No text has more tokens than bytes and two."""
    result = check("short_corpus", "--stage", "pt")
    assert result.exit_code == 2 and "at most 46 tokens in 2 rows are less than one block" in result.stdout
    assert check("short_corpus", "--stage", "pt", "--cutoff-len", "4").exit_code == 0


def test_thresholds_decide() -> None:
    assert check("empty_output", "--empty", "0.5").exit_code == 1
    assert check("role_order", "--dropped", "0.7").exit_code == 1
    assert check("tags_mismatch", "--dropped", "1").exit_code == 2, "no row is left, whatever is allowed"


def test_broken_dataset_info(tmp_path: Path) -> None:
    text = (CASES / "dataset_info.trailing_comma.json").read_text()
    (tmp_path / "dataset_info.json").write_text(text)
    result = check("good", folder=tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path}/dataset_info.json:4:1: a comma stands before `}}`: `}}`" in result.stdout


def rows(tmp_path: Path, **sets: Any) -> Path:
    for name, values in sets.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    info = {name: {"file_name": f"{name}.json"} for name in sets}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path


def test_evaluation_rows_that_are_trained_on(tmp_path: Path) -> None:
    def row(question: str) -> dict[str, str]:
        return {"instruction": question, "input": "", "output": "a"}

    folder = rows(tmp_path, t=[row("What is it?"), row("b")], e=[row("x"), row("what is  it")])
    result = check("t", "--eval", "e", folder=folder)
    assert result.exit_code == 1
    assert (
        "warning 1 of 2 evaluation rows ask what a training row asks: e row 1 = t row 0 (whatisit)"
        in result.stdout
    )
    assert check("t", "--eval", "e", "--leaked", "0.4", folder=folder).exit_code == 2


@pytest.mark.parametrize("ending", ["csv", "parquet", "arrow", "txt", "folder"])
def test_other_files_are_read_as_the_host_reads_them(ending: str, tmp_path: Path) -> None:
    """A row without an answer is found in each; plain text has lines alone."""
    from datasets import Dataset

    table = Dataset.from_list(
        [{"instruction": f"q{n}", "input": "", "output": "a" if n else None} for n in range(20)]
    )
    entry: dict[str, Any] = {"file_name": f"x.{ending}"}
    if ending == "csv":
        table.to_csv(tmp_path / "x.csv")
    elif ending == "parquet":
        table.to_parquet(tmp_path / "x.parquet")
    elif ending == "arrow":
        table.save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(tmp_path / "x.arrow")
    elif ending == "txt":
        (tmp_path / "x.txt").write_text("one\n\ntwo\n")
        entry["columns"] = {"prompt": "text"}
    else:
        folder = tmp_path / "x.folder"
        folder.mkdir()
        for part in range(2):
            table.select(range(part * 10, part * 10 + 10)).to_json(folder / f"{part}.jsonl")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"x": entry}))
    result = check("x", *(["--stage", "pt", "--cutoff-len", "2"] if ending == "txt" else []), folder=tmp_path)
    expected = {"txt": "the text (`text`) is empty"}.get(ending, "20 rows, 19 kept")
    assert expected in result.stdout and result.exit_code in (1, 2), result.stdout


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for name in ("a.json", "b.csv"):
        (tmp_path / "x" / name).write_text("[]")
    (tmp_path / "dataset_info.json").write_text('{"x": {"file_name": "x"}}')
    assert "files of several types in one folder (csv, json)" in check("x", folder=tmp_path).stdout
    (tmp_path / "x" / "c.xlsx").touch()
    assert "c.xlsx: files must end with one of .arrow, .csv, .json" in check("x", folder=tmp_path).stdout


def test_model_needs_a_template() -> None:
    result = check("good", "--model", "x")
    assert result.exit_code == 2 and "--model needs --template" in result.output


def test_progress_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data_progress, "EVERY", 0.0)
    with data_progress.Progress() as progress:
        progress.begin("x", 2_000_000)
        progress.advance(500_000)
        progress.advance(500_000)
    assert capsys.readouterr() == ("", "x: 25 % of 2.0 MB read\nx: 50 % of 2.0 MB read\n")


def test_command_when_it_is_piped(tmp_path: Path) -> None:
    """JSON alone on stdout; progress is lines on stderr, of which a small file has none."""
    words = [
        str(BIN / "llamafactory-ascend"),
        "data",
        "check",
        "good",
        "no_file",
        "--dataset-dir",
        str(CASES),
        "--json",
    ]
    done = subprocess.run(words, env=environment(npu=False), capture_output=True, text=True, timeout=120)
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["exit_code"], done.stderr) == (2, 2, "")
    assert [(one["name"], one["rows"], one["complete"]) for one in verdict["sets"]] == [
        ("good", 6, True),
        ("no_file", 0, False),
    ]


ROW = '{"instruction": "a", "input": "", "output": "b"}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{ROW}\n{{"instruction": "a", "instruction": "b"}}\n', ":2:1: the key `instruction` stands twice"),
        ('{"instruction": "a \\ud800 b"}\n', ":1:20: half a surrogate pair"),
        ('{"instruction": "\\ud83d\\ude00", "input": "", "output": "b"}\n', "nothing to say"),
        (f"{ROW}\n{'[' * 100_000}\n", ":2:1: nested too deeply"),
        (f'{{"z": {"9" * 5_000}}}\n', ":1:1: exceeds the limit (4300 digits)"),
        (f"{ROW}\n\0\0\0\n", r":2:1: expecting value: `\x00\x00\x00`"),
    ],
)
def test_rows_that_end_the_hosts_reader(text: str, said: str, tmp_path: Path) -> None:
    """Arrow refuses a key twice and half a pair, and dies of deep nesting without a word."""
    (tmp_path / "x.jsonl").write_text(text)
    (tmp_path / "dataset_info.json").write_text('{"x": {"file_name": "x.jsonl"}}')
    assert said in check("x", folder=tmp_path).stdout


def test_places_that_hold_no_file(tmp_path: Path) -> None:
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "memory.jsonl").symlink_to("/proc/self/mem")  # a file whose first byte cannot be read
    (tmp_path / "deep" / "er.jsonl").mkdir(parents=True)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "bad.parquet").write_text("no parquet")
    said = {
        "loop.jsonl": "loop.jsonl, a link to loop.jsonl, does not exist",
        "memory.jsonl": "memory.jsonl cannot be read: Input/output error",
        "deep": "er.jsonl is a folder",
        "nothing": f"folder {tmp_path / 'nothing'} is empty",
        "x" * 300: "x does not exist",
        "a\0b": "does not exist",
        "": "`.file_name` is empty",
        "bad.parquet": "Parquet magic bytes not found",
    }
    info = {name: {"file_name": name} for name in said}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    result = check(*said, folder=tmp_path)
    assert result.exit_code == 2, result.exception
    for sentence in said.values():
        assert sentence in result.stdout
    listed = CliRunner().invoke(app, ["data", "ls", "--dataset-dir", str(tmp_path), "--json"])
    rows = {one["name"]: one for one in json.loads(listed.stdout)}
    assert rows["bad.parquet"]["rows"] is None and rows["loop.jsonl"]["remark"] == "its file does not exist"


def test_only_the_rows_that_are_used_are_judged(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(f"{ROW}\n" * 4 + ROW.replace('"b"', '""') + "\n")
    (tmp_path / "dataset_info.json").write_text('{"x": {"file_name": "x.jsonl"}}')
    assert "1 of 5 rows are empty" in check("x", folder=tmp_path).stdout
    found = check("x", "--max-samples", "4", folder=tmp_path)
    assert found.exit_code == 0 and "x: 4 rows, 4 kept, 1 more behind max_samples" in found.stdout
