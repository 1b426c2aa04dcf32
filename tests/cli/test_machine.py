"""Machines as file trees: what is missing on each, and what to type."""

import os
from pathlib import Path
from typing import Any

import pytest

from llamafactory_ascend.cli import machine
from llamafactory_ascend.cli.machine import MANAGERS, judge, look
from tests.cli.test_npu_smi import BUSY, TWO_CHIPS


def tree(root: Path, *paths: str) -> Path:
    """Make empty files at ``paths``; a folder where the name ends with a slash."""
    for path in paths:
        (root / path if path.endswith("/") else (root / path).parent).mkdir(parents=True, exist_ok=True)
        if not path.endswith("/"):
            (root / path).touch()
    return root


def smi(folder: Path, script: str) -> dict[str, str]:
    """Put a program called npu-smi on a path of its own."""
    program = tree(folder, "bin/") / "bin" / "npu-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def sound(root: Path) -> Path:
    tree(root, "dev/davinci0", "dev/davinci12", *(f"dev/{name}" for name in MANAGERS))
    tree(root, "usr/local/Ascend/driver/", "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/")
    (root / machine.DRIVER / "version.info").write_text("Version=25.0.rc1\nascendhal_version=7.35\n")
    toolkit = root / "usr/local/Ascend/ascend-toolkit/latest"
    info = "package_name=Ascend-cann-toolkit\nversion=8.2.RC1\n"
    (toolkit / "aarch64-linux/ascend_toolkit_install.info").write_text(info)
    return toolkit


def said(found: machine.Machine) -> list[tuple[str, str]]:
    return [(finding.subject, finding.message) for finding in judge(found)]


def test_sound_machine(tmp_path: Path) -> None:
    toolkit = sound(tmp_path)
    environment = {**smi(tmp_path, "exit 0"), "ASCEND_HOME_PATH": str(toolkit)}
    found = look(environment, tmp_path)
    assert found.devices == (str(tmp_path / "dev/davinci0"), str(tmp_path / "dev/davinci12"))
    assert (found.driver, found.cann, found.sourced, found.container) == ("25.0.rc1", "8.2.RC1", True, False)
    assert said(found) == [("npu-smi", "it printed no card in a form this version can read")]


def test_sick_card_and_foreign_process(tmp_path: Path) -> None:
    toolkit = sound(tmp_path)
    (tmp_path / "table").write_text(BUSY, encoding="utf-8")
    environment = {**smi(tmp_path, f"cat {tmp_path}/table"), "ASCEND_HOME_PATH": str(toolkit)}
    findings = judge(look(environment, tmp_path))
    assert [(f.subject, f.message) for f in findings] == [
        ("NPU 12", "its health is Alarm"),
        ("NPU 12", "used by process 31337 (python3.11 train.py), 57613 MB"),
    ]
    assert findings[0].hint == "npu-smi info -t health -i 12"
    assert "leave device 12 out with ASCEND_RT_VISIBLE_DEVICES" in findings[1].hint

    (tmp_path / "table").write_bytes(TWO_CHIPS.encode() + "设备".encode("gb18030"))  # no UTF-8
    findings = judge(look(environment, tmp_path))
    assert [(f.subject, f.hint) for f in findings] == [
        ("NPU 1 chip 1", "npu-smi info -t health -i 1 -c 1"),
        ("NPU 1 chip 1", "end it, or leave device 3 out with ASCEND_RT_VISIBLE_DEVICES"),
    ]


def test_what_this_user_may_not_see_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's files have a group, and CANN may lie in another's home: stat raises, as does a read."""
    toolkit = sound(tmp_path)
    hidden = {str(tmp_path / "home/cann"), str(tmp_path / "dev/hisi_hdc")}
    stat, read = Path.stat, Path.read_text

    def may_not(path: Path, **words: Any) -> Any:
        if str(path) in hidden:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **words)

    def may_not_read(path: Path, *words: Any, **named: Any) -> str:
        if path.name == "version.info":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *words, **named)

    monkeypatch.setattr(Path, "stat", may_not)  # root, who runs tests in a container, may see everything
    monkeypatch.setattr(Path, "read_text", may_not_read)
    found = look({**smi(tmp_path, "exit 0"), "ASCEND_HOME_PATH": str(tmp_path / "home/cann")}, tmp_path)
    assert (found.driver, found.toolkit, "hisi_hdc" in found.managers) == ("", "", False)
    assert look({"ASCEND_HOME_PATH": str(toolkit)}, tmp_path).cann == "8.2.RC1"


def test_a_pod_of_kubernetes_is_a_container(tmp_path: Path) -> None:
    """containerd leaves no file that says so."""
    assert look({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path).container


def test_container_without_devices_and_driver(tmp_path: Path) -> None:
    tree(tmp_path, ".dockerenv", "dev/")
    findings = judge(look({}, tmp_path))
    assert [finding.subject for finding in findings] == ["device nodes", "CANN"]
    assert "--device /dev/davinci0 --device /dev/davinci_manager" in findings[0].hint

    tree(tmp_path, "dev/davinci0", "dev/hisi_hdc", "usr/local/Ascend/cann/", "usr/local/Ascend/set_env.sh")
    findings = judge(
        look(smi(tmp_path, "echo 'dcmi module initialize failed. ret is -8005'; exit 1"), tmp_path)
    )
    assert [(finding.level, finding.subject) for finding in findings] == [
        ("warning", "device nodes"),
        ("warning", "driver"),
        ("warning", "CANN"),
        ("note", "npu-smi"),
    ]
    nodes, driver, cann, npu_smi = findings
    assert nodes.message == "missing beside the cards: /dev/davinci_manager, /dev/devmm_svm"
    assert nodes.hint == "start the container with --device /dev/davinci_manager --device /dev/devmm_svm"
    assert driver.hint.endswith("-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro")
    assert cann.hint == f"source {tmp_path}/usr/local/Ascend/set_env.sh"
    assert npu_smi.message == "npu-smi failed with code 1: dcmi module initialize failed. ret is -8005"


def test_folder_that_the_environment_names_is_not_there(tmp_path: Path) -> None:
    found = look({"ASCEND_HOME_PATH": str(tmp_path / "gone")}, tmp_path)
    assert ("CANN", "no toolkit in the folder the environment names") in said(found)


def test_npu_smi_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound(tmp_path)
    monkeypatch.setattr(machine, "TIMEOUT", 0.2)
    found = look(smi(tmp_path, "exec sleep 5"), tmp_path)
    assert found.smi is None and found.smi_problem.endswith("the driver hangs")


def test_no_npu_asks_nobody(tmp_path: Path) -> None:
    found = look(smi(tmp_path, f"touch {tmp_path}/asked"), tmp_path)
    assert found == machine.Machine() and not (tmp_path / "asked").exists()
