"""What the system refuses is one line and exit code 2, in every command that writes."""

import errno
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from llamafactory_ascend.cli import app, data_files, failures
from llamafactory_ascend.errors import AscendError


@pytest.mark.parametrize(
    "words",
    [
        ("data", "add", "vertical_demo", "--dataset-dir", "FILE/new"),
        ("data", "make", "vertical_demo", "FILE/new"),
        ("recipes", "cp", "qwen2_5_7b_lora_sft", "FILE/my.yaml"),
        ("data", "remove", "vertical_demo", "--dataset-dir", "FILE"),
    ],
)
def test_a_place_that_cannot_be_written(words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    result = CliRunner().invoke(app, [word.replace("FILE", str(file)) for word in words])
    assert result.exit_code == 2 and result.stderr.startswith("error ") and str(file) in result.stderr
    assert file.read_text() == "mine"


def test_a_full_disk_does_not_say_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stop, failures.told(Path("out.jsonl")):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert stop.value.exit_code == 2
    assert capsys.readouterr().err == "error out.jsonl: No space left on device\n"
    with pytest.raises(BrokenPipeError), failures.told():
        raise BrokenPipeError


def test_targets(tmp_path: Path) -> None:
    with pytest.raises(AscendError, match="/dev/null is no ordinary file"):
        data_files.check_target(Path("/dev/null"), force=True)
    there, link = tmp_path / "there.jsonl", tmp_path / "link.jsonl"
    there.write_text("old")
    link.symlink_to(there)
    with data_files.written(link) as lines:
        lines.write("new")
    assert link.is_symlink() and there.read_text() == "new"
    refused = pytest.raises(AscendError, match="another process writes it")
    with data_files.alone(tmp_path), refused, data_files.alone(tmp_path, wait=False):
        pass
