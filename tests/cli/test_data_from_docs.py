"""``llamafactory-ascend data from-docs``: documents in any encoding as texts of a token length."""

import json
import random
from pathlib import Path

import pytest
from click.testing import Result
from transformers import AutoTokenizer
from typer.testing import CliRunner

from llamafactory_ascend.cli import app, documents

CHINESE = "昇腾处理器用于训练大模型。它的内存是有限的，所以要算清楚。"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "sum", "of", "numbers"]


def from_docs(*words: str) -> Result:
    return CliRunner().invoke(app, ["data", "from-docs", *words])


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def prose(seed: int, paragraphs: int) -> str:
    stream = random.Random(seed)
    sizes = [stream.randint(3, 90) for _ in range(paragraphs)]
    return "\n\n".join(" ".join(stream.choices(WORDS, k=size)).capitalize() + "." for size in sizes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "docs"
    (made / "deep" / "er").mkdir(parents=True)
    (made / "a.md").write_text(prose(0, 40))
    (made / "deep" / "gbk.txt").write_bytes(CHINESE.encode("gbk"))
    (made / "deep" / "er" / "utf16.TXT").write_text("第二个文件。\n\nUTF-16 text.", encoding="utf-16")
    (made / "deep" / "again.md").write_text(prose(0, 40))
    (made / "deep" / "picture.png").write_bytes(bytes(range(256)))
    return made


def test_documents_become_texts_for_a_training(folder: Path, assets: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    out = data / "corpus.jsonl"
    words = ["--model", str(assets / "qwen3"), "--tokens", "128", "--dataset-dir", str(data)]
    found = from_docs(str(folder), str(out), *words)
    assert found.exit_code == 0, found.output
    assert f"{folder / 'deep' / 'gbk.txt'}: decoded from GBK" in found.output
    assert f"{folder / 'deep' / 'er' / 'utf16.TXT'}: decoded from UTF-16" in found.output
    texts = [json.loads(line)["text"] for line in out.read_text(encoding="utf-8").splitlines()]
    assert texts[-2:] == ["第二个文件。\n\nUTF-16 text.", CHINESE]
    tokenizer = AutoTokenizer.from_pretrained(assets / "qwen3")
    sizes = [len(tokenizer(text)["input_ids"]) for text in texts]
    assert max(sizes) <= 127 and len(set(texts)) == len(texts)  # one is left for the end token
    assert sum(sizes[:-3]) / len(sizes[:-3]) > 0.8 * 127  # nothing is cut into small pieces
    info = json.loads((data / "dataset_info.json").read_text())
    assert info == {"corpus": {"file_name": "corpus.jsonl", "columns": {"prompt": "text"}}}
    checked = CliRunner().invoke(
        app, ["data", "check", "corpus", "--stage", "pt", "--dataset-dir", str(data)]
    )
    assert "corpus: " in checked.output and "error" not in checked.output

    before = out.read_bytes()
    refused = from_docs(str(folder), str(out), *words)
    assert refused.exit_code == 2 and "exists; nothing was written" in refused.output
    assert from_docs(str(folder), str(out), *words, "--force").exit_code == 0
    assert out.read_bytes() == before and names(data) == ["corpus.jsonl", "dataset_info.json"]


@pytest.mark.parametrize("most", [16, 40, 127, 400])
def test_passages_hold_everything_and_overlap(most: int) -> None:
    """Nothing is lost, none is too long, each begins with the end of the one before, a quarter at most."""
    text = prose(1, 60)
    found = list(documents.passages(text, most, lambda part: len(part.split())))
    assert len(found) > 1 and max(len(part.split()) for part in found) <= most
    words = text.split()
    rebuilt: list[str] = []
    for number, passage in enumerate(found):
        parts = passage.split()
        shared = next(
            (size for size in range(min(len(parts), most), 0, -1) if rebuilt[-size:] == parts[:size]), 0
        )
        if number:
            assert shared <= most // 4
            assert shared or most == 16
        rebuilt += parts[shared:]
    assert rebuilt == words


def test_a_long_line_is_cut_in_linear_time() -> None:
    counted = 0

    def length(text: str) -> int:
        nonlocal counted
        counted += len(text)
        return len(text)

    found = list(documents.passages("x" * 200_000, 1000, length))
    assert max(map(len, found)) <= 1000 and counted < 400 * 200_000


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"\xef\xbb\xbfwith a mark", "UTF-8 with a byte order mark"),
        ("你好，世界。".encode("utf-16-le"), None),
        ("这是 一行\n".encode("utf-16-be"), "UTF-16 without a byte order mark"),
        ("plain".encode("utf-32"), "UTF-32"),
        (b"", "UTF-8"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", None),
        ("naïve café".encode("latin-1"), None),
        (b"ab\xff\xfe\xfd" * 20, None),
    ],
)
def test_encodings_are_found_or_refused(data: bytes, encoding: str | None, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(data)
    found = documents.read(tmp_path / "x.txt")
    if encoding is None:
        assert found.text is None and found.encoding
    else:
        assert found.encoding == encoding and found.text is not None and "\ufeff" not in found.text


def test_files_that_cannot_be_decoded_are_named_and_skipped(
    folder: Path, assets: Path, tmp_path: Path
) -> None:
    (folder / "broken.txt").write_bytes(b"\xff\x00\x80 no text \x01" * 50)
    out = tmp_path / "o.jsonl"
    found = from_docs(str(folder), str(out), "--model", str(assets / "qwen3"))
    assert found.exit_code == 1 and "1 of 5 files were skipped" in found.output
    assert f"warning {folder / 'broken.txt'} is skipped: its encoding is " in found.output
    assert (
        'for dataset_info.json: "o": {"file_name": "o.jsonl", "columns": {"prompt": "text"}}' in found.output
    )
    assert len(out.read_text().splitlines()) >= 3


def test_nothing_is_written_where_nothing_can_be(folder: Path, assets: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.txt").write_text(" \n\n ")
    out = tmp_path / "o.jsonl"
    for words, said in (
        ([str(empty), str(out), "--model", str(assets / "qwen3")], "no file has a text"),
        ([str(empty / "no"), str(out), "--model", str(assets / "qwen3")], "there is no folder"),
        ([str(folder), str(out), "--model", str(tmp_path / "no_model")], "--model "),
    ):
        found = from_docs(*words)
        assert found.exit_code == 2 and said in found.output
    data = tmp_path / "data"
    data.mkdir()
    (data / "dataset_info.json").write_text('{"o": {"file_name": "other.json"}}')
    words = [str(folder), str(out), "--model", str(assets / "qwen3"), "--dataset-dir", str(data)]
    found = from_docs(*words)
    assert found.exit_code == 2 and "another data set is called `o`" in found.output
    assert not out.exists() and not [name for name in names(tmp_path) if name.startswith(".")]
