"""Dockerfile and compose.yaml.

There is no container engine here, so the Dockerfile's last RUN runs as it stands in an environment whose
packages are those of the official image in name.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.installed import ROOT, build_wheel, make_image, run

DOCKERFILE = ROOT / "Dockerfile"


def last_run() -> str:
    """The shell text of the last RUN instruction."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    return text[text.rindex("\nRUN ") + 5 :].replace("\\\n", "\n")


def install(tmp_path: Path, wheel: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run the RUN instruction with the wheel where the first stage would have put it."""
    python = make_image(tmp_path / "venv")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    shutil.copy(wheel, wheels)
    shell = re.findall(r'SHELL \["(.*)"\]', DOCKERFILE.read_text(encoding="utf-8"))[0].split('", "')
    return subprocess.run(
        [*shell, script.replace("/wheels", str(wheels))],
        env={"PATH": f"{python.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def freeze(tmp_path: Path) -> set[str]:
    return set(run([str(tmp_path / "venv/bin/python"), "-m", "pip", "freeze"]).splitlines())


def test_hadolint_finds_nothing() -> None:
    assert run([str(Path(sys.executable).with_name("hadolint")), str(DOCKERFILE)]) == ""


def test_dockerfile_adds_the_plugin_and_changes_no_version(tmp_path: Path, wheel: Path) -> None:
    done = install(tmp_path, wheel, last_run())
    assert done.returncode == 0, done.stderr
    after = freeze(tmp_path)
    assert {
        "torch==2.10.0+cpu",
        "torch-npu==2.10.0.post2",
        "llamafactory==0.9.6.dev0",
        "transformers==5.8.0",
    } <= after
    assert {line.split("==")[0].split(" @ ")[0] for line in after} >= {
        "llamafactory-ascend-plugin",
        "pluggy",
        "wrapt",
    }
    assert not (tmp_path / "wheels").exists()


def test_dockerfile_fails_where_something_would_change(tmp_path: Path, wheel: Path) -> None:
    older = last_run().replace(
        "pip freeze > /wheels/after.txt", "pip freeze | grep -v ^numpy > /wheels/after.txt"
    )
    done = install(tmp_path, wheel, older)
    assert done.returncode == 1
    assert "numpy==" in done.stdout and "these would change" in done.stderr


def test_compose_gives_two_cards_and_the_driver() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["train"]
    assert service["devices"] == [
        "/dev/davinci0",
        "/dev/davinci1",
        "/dev/davinci_manager",
        "/dev/devmm_svm",
        "/dev/hisi_hdc",
    ]
    mounts = [volume.split(":") for volume in service["volumes"]]
    driver = {source for source, target, *mode in mounts if source == target and mode == ["ro"]}
    assert driver == {
        "/usr/local/dcmi",
        "/usr/local/bin/npu-smi",
        "/usr/local/Ascend/driver/lib64",
        "/usr/local/Ascend/driver/version.info",
        "/etc/ascend_install.info",
    }
    assert service["build"]["args"] == ["BASE_IMAGE"]
    assert "ARG BASE_IMAGE=" in DOCKERFILE.read_text(encoding="utf-8")


def test_compose_lines_for_the_model_cache_work_once_uncommented() -> None:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    start = text.index("    working_dir:")
    service = yaml.safe_load(re.sub(r"(?m)^(\s+)# ", r"\1", text[:start]) + text[start:])["services"]["train"]
    source, _, target = service["volumes"][-1].rpartition(":")
    assert source == "${HF_HOME:-~/.cache/huggingface}"
    assert service["environment"] == {"HF_HOME": target}
