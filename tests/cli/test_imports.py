"""Packages that the probe did not reach are imported one by one."""

from pathlib import Path

import pytest

from llamafactory_ascend.cli import imports
from llamafactory_ascend.cli.diagnosis import Probe

VERSIONS = {"torch": "2", "torch_npu": "2", "triton": "3", "peft": "0", "numpy": "1"}


def probe(**failed: str) -> Probe:
    return Probe(
        [{"stage": name, "state": "failed", "error": error} for name, error in failed.items()], 0, ""
    )


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bodies = {
        "torch_npu": "raise OSError('no driver')",  # as torch itself
        "triton": "import os; os.kill(os.getpid(), 11)",
        "peft": "raise ImportError('made for another version')",
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(body, encoding="utf-8")
    return tmp_path


def test_each_broken_package_is_named_once(packages: Path) -> None:
    found = list(imports.judge(VERSIONS, probe(torch="OSError: no driver")))
    assert [(finding.level, finding.subject, finding.message) for finding in found] == [
        ("error", "triton", "import ends the process with code -11: it said nothing"),
        ("error", "peft", "ImportError: made for another version"),
    ]


def test_what_the_probe_imported_is_not_imported_again(packages: Path) -> None:
    stages = [{"stage": name, "state": "done", "value": {}} for name in ("torch", "peft", "triton")]
    assert list(imports.judge(VERSIONS, Probe(stages, 0, ""))) == []


def test_import_that_hangs(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (packages / "peft.py").write_text("import time; time.sleep(20)", encoding="utf-8")
    monkeypatch.setattr(imports, "TIMEOUT", 0.5)
    (found,) = imports.judge({"peft": "0"}, probe())
    assert found.message == "import did not end within 0.5 s"


def test_what_dies_as_torch_does_is_not_said_again(packages: Path) -> None:
    died = Probe([{"stage": "torch", "state": "begun"}], -11, "")
    assert [finding.subject for finding in imports.judge(VERSIONS, died)] == ["torch_npu", "peft"]
