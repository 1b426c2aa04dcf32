"""Installing into the official image changes nothing that the image has."""

import importlib.metadata
import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.installed import IMAGE, build_wheel, closure, make_image, run

# Small, and pure Python or with a pure Python wheel: nothing that an image would have to compile or trust.
MAY_COME = {"llamafactory-ascend-plugin", "pluggy", "wrapt"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_image(tmp_path_factory.mktemp("image") / "venv"))


def would_install(python: str, *what: str) -> dict[str, str]:
    """Return name -> version of what pip would install, dependencies included."""
    command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", *what]
    report = json.loads(run(command))
    return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in report["install"]}


def test_image_is_sound_before_we_come(image: str) -> None:
    assert would_install(image, "llamafactory==0.9.6.dev0", "torch==2.10.0", "transformers==5.8.0") == {}
    freeze = run([image, "-m", "pip", "freeze"])
    assert all(f"{name}=={version}" in freeze for name, version in IMAGE.items())


def test_wheel_adds_only_small_packages(image: str, wheel: Path) -> None:
    added = would_install(image, str(wheel))
    assert set(added) == MAY_COME
    assert not set(added) & set(closure("llamafactory"))


def test_a_wheel_that_asks_for_another_torch_would_be_seen(image: str, wheel: Path) -> None:
    assert "numpy" in would_install(image, str(wheel), "numpy!=" + importlib.metadata.version("numpy"))


def test_dependencies_have_lower_bounds_only() -> None:
    texts = importlib.metadata.requires("llamafactory-ascend-plugin") or []
    requirements = [Requirement(text) for text in texts]
    needed = [r for r in requirements if r.marker is None]
    assert {clause.operator for r in needed for clause in r.specifier} == {">="}
    for requirement in needed:
        if requirement.name in IMAGE:
            assert requirement.specifier.contains(IMAGE[requirement.name]), requirement
