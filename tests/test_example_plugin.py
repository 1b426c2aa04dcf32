"""The example plugin: installed as a user would, run by the stock command."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import Train

EXAMPLE = Path(__file__).parent.parent / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pip install` of a copy, into a folder of its own; nothing is downloaded."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
    ]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=120)
    assert (target / "steplog.py").exists()
    return target


def test_run(train: Train, installed: Path) -> None:
    words = ("--ascend.plugins.steplog.every", "2")
    result = train(npu=False, env={"PYTHONPATH": str(installed)}, words=words, logging_steps=3)
    assert result.code == 0, result.text
    lines = [json.loads(line) for line in (result.output / "steplog.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[0]["loss"] is None, "nothing is logged before step 3"
    assert lines[1]["loss"] == result.losses[0]
    assert result.report["ranks"][0]["steplog"] == {"every": 2, "lines": 2}
    assert {
        "level": "warning",
        "subject": "steplog",
        "message": "the loss is new every 3 steps only (logging_steps)",
    } in result.report["findings"]


def test_settings_that_cannot_be(train: Train, installed: Path) -> None:
    """The plugin's own refusal ends the run before its model is loaded."""
    env = {"PYTHONPATH": str(installed)}
    result = train(npu=False, env=env, ascend={"plugins": {"steplog": {"evry": 2}}})
    assert result.code == 1
    assert "ascend.plugins.steplog is {'evry': 2}\n  next: write `steplog: {every: 10}`" in result.text
    assert "Loading weights" not in result.text
