"""``llamafactory-ascend data stats``: what it prints, draws and refuses, and that it ends when it is told."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from llamafactory_ascend.cli import app, data_histogram, data_workers
from llamafactory_ascend.errors import AscendError
from tests.checks.lengths.test_histogram import made
from tests.running import BIN


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def stats(*words: str) -> Result:
    return CliRunner().invoke(app, ["data", "stats", *words])


@pytest.fixture
def options(assets: Path) -> list[str]:
    model = str(assets / "qwen3")
    folder = str(assets / "data")
    return ["--model", model, "--template", "qwen3_nothink", "--dataset-dir", folder, "--cutoff-len", "48"]


def test_a_recipe_and_its_data_set_give_the_same_figures(
    assets: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process or in two, from a recipe with overrides or by name."""
    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    recipe = {
        "model_name_or_path": str(assets / "qwen3"),
        "dataset": "tiny",
        "dataset_dir": str(assets / "data"),
        "template": "qwen3_nothink",
        "cutoff_len": 999,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-4,
        "ascend": {"kernels": "off"},
    }
    path = tmp_path / "a recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    words = [str(path), "cutoff_len=48", "preprocessing_batch_size=10", "--ranks", "2", "--json"]
    one, two = (stats(*words, "--workers", str(count)) for count in (1, 2))
    assert one.exit_code == two.exit_code == 0, one.output
    figures = [json.loads(result.stdout) for result in (one, two)]
    for found in figures:
        found.pop("seconds")
    assert figures[0] == figures[1]
    assert figures[0]["steps"] == {
        "samples": 64, "ranks": 2, "batch": 2, "accumulation": 4, "per_epoch": 4, "total": 12,
    }  # fmt: skip
    named = json.loads(stats("tiny", *options, "--json", "--workers", "1").stdout)
    for key in ("tokens", "tokens_kept", "percentiles", "supervised", "over_cutoff", "ends"):
        assert named[key] == figures[0][key]
    assert named["over_cutoff"] > 0 and named["percentiles"]["max"] > 48


def test_text_and_picture(options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "lengths.png"
    found = stats("tiny", *options, "--workers", "1", "--plot", str(file))
    assert found.exit_code == 0, found.output
    for fragment in ("tiny: 64 rows", "cut by cutoff_len 48: ", "95 % of the rows ", "--- cutoff_len 48 ---"):
        assert fragment in found.stdout
    with Image.open(file) as picture:
        assert picture.format == "PNG" and picture.width > 600
    before = file.read_bytes()
    refused = stats("tiny", *options, "--plot", str(file))
    assert refused.exit_code == 2 and "exists; nothing was written" in refused.output
    assert file.read_bytes() == before and names(tmp_path) == ["lengths.png"]


def test_the_tail_of_packing_is_named(assets: Path) -> None:
    words = ["--model", str(assets / "qwen3"), "--dataset-dir", str(assets / "data"), "--stage", "pt"]
    found = json.loads(stats("tiny_pt", *words, "--cutoff-len", "100", "--json").stdout)
    assert found["packing"] and found["blocks"] == found["tokens"] // 100
    assert found["dropped_tail"] == found["tokens"] % 100 > 0
    assert found["steps"]["samples"] == found["blocks"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tinny"], "there is no data set `tinny`: did you mean `tiny`"),
        (["tiny", "--stage", "ppo"], "stage `ppo` is not counted"),
        (["tiny", "--plot", "no/such/folder/x.png"], "there is no folder"),
        (["nowhere.yaml", "--cutoff-len", "3"], "a recipe has its own"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], said: str, options: list[str]) -> None:
    found = stats(*words, *options)
    assert found.exit_code == 2 and said in found.output


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file or directory"), ("a: [", "while parsing"), ("- 1", "Cannot merge incompatible")],
)
def test_recipes_that_cannot_be_read(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "x.yaml").write_text(text)
    found = stats(str(tmp_path / "x.yaml"))
    assert found.exit_code == 2 and f"x.yaml cannot be read: {said}" in found.output


def test_rows_that_are_left_out_and_broken_files(assets: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}]},
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "broken.jsonl").write_text('{"instruction": "a", "output": "b"}\n{"instruction": \n')
    entry = json.loads((assets / "data" / "dataset_info.json").read_text())["tiny_mm"]
    chat = {**entry, "file_name": "chat.jsonl", "columns": {"messages": "messages"}}
    info = {"chat": chat, "broken": {"file_name": "broken.jsonl"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    words = ["--model", str(assets / "qwen3"), "--template", "qwen3", "--dataset-dir", str(tmp_path)]
    found = stats("chat", *words)
    assert found.exit_code == 1 and "chat: 2 rows, 1 left out" in found.stdout
    assert "chat row 1: its turns are no pairs of question and answer" in found.stdout
    broken = stats("broken", *words, "--workers", "2")
    assert broken.exit_code == 2 and "broken.jsonl:2:" in broken.output


def test_few_batches_are_read_ahead() -> None:
    """The reader is never more than a few batches in front of what is counted: memory does not grow."""
    read = 0

    def batches() -> Iterator[int]:
        nonlocal read
        while read < 50:
            read += 1
            yield read

    ahead = []
    for done, result in enumerate(data_workers.spread(_double, batches(), 2), 1):
        assert result == 2 * done
        ahead.append(read - done)
    assert len(ahead) == 50 and max(ahead) <= 4


def _double(value: int) -> int:
    return 2 * value


def _die(value: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_an_error_and_no_wait() -> None:
    with pytest.raises(AscendError, match="a worker process was killed"):
        list(data_workers.spread(_die, range(9), 2))


def test_ctrl_c_ends_all_processes_and_writes_nothing(options: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    row = json.dumps({"instruction": "the quick brown fox " * 50, "output": "a lazy dog " * 50})
    (folder / "many.jsonl").write_text((row + "\n") * 60_000)
    (folder / "dataset_info.json").write_text(json.dumps({"many": {"file_name": "many.jsonl"}}))
    words = [*options, "--dataset-dir", str(folder), "--workers", "2", "--plot", str(tmp_path / "x.png")]
    command = [str(BIN / "llamafactory-ascend"), "data", "stats", "many", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    for line in process.stderr:  # a line every five seconds, where there is no terminal
        if line.startswith("many: "):
            assert line.rstrip().endswith("MB read")
            break
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(60) == 130 and "interrupted: nothing was written" in rest, rest
    assert time.monotonic() - begun < 20 and "Traceback" not in rest
    assert names(tmp_path) == ["data"]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_text_histogram() -> None:
    lines = data_histogram.draw_text(made([10] * 80 + [25] * 40 + [90]), 50)
    assert lines[0].startswith("10 - 19 " + "█" * 50) and lines[0].endswith(" 80")
    assert lines[1].startswith("20 - 29 " + "█" * 25 + " ") and lines[1].endswith(" 40")
    assert "--- cutoff_len 50 ---" in lines[4] and lines[-1].endswith(" 1")
    assert data_histogram.draw_text(made([]), 50) == []
