"""Our wheel, and environments to install it into: an empty one, and one like the official image."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SOURCES = ("llamafactory_ascend", "recipes", "dataset_info", "pyproject.toml", "README.md", "LICENSE")

# What the official Ascend image carries where it differs from this environment. Versions with a local part or
# a .dev are there on purpose: the lower bounds of our dependencies have to accept them.
IMAGE = {
    "torch": "2.10.0+cpu",
    "torchvision": "0.25.0+cpu",
    "torchaudio": "2.10.0+cpu",
    "torch-npu": "2.10.0.post2",
    "llamafactory": "0.9.6.dev0",
    "transformers": "5.8.0",
    "peft": "0.18.1",
    "accelerate": "1.11.0",
    "trl": "0.24.0",
}


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of its sources, so that nothing is left in the checkout."""
    tree = folder / "tree"
    tree.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=ignore)
        else:
            shutil.copy(source, tree / name)
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_venv(folder: Path) -> Path:
    """Make an empty environment with pip and return its python."""
    run([sys.executable, "-m", "venv", str(folder)])
    return folder / "bin" / "python"


def make_image(folder: Path) -> Path:
    """Make an environment whose metadata is that of the official image: packages are there in name only.

    They are those llamafactory needs, with what these need in turn, as they are installed here; versions are
    those of IMAGE where it names one.

    Returns:
        Its python.
    """
    python = make_venv(folder)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    for name, requirements in closure("llamafactory", "torch").items():
        version = IMAGE.get(name) or importlib.metadata.version(name)
        _write_metadata(site, name, version, [_relaxed(requirement) for requirement in requirements])
    _write_metadata(site, "torch-npu", IMAGE["torch-npu"], ["torch==2.10.0"])
    return python


def closure(*roots: str) -> dict[str, list[Requirement]]:
    """Return canonical name -> requirements of the installed packages that ``roots`` need in all."""
    found: dict[str, list[Requirement]] = {}
    todo = [*roots]
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found or name.startswith("nvidia-") or name in ("triton", "pip", "setuptools"):
            continue  # torch for a CPU needs neither CUDA nor triton; pip and setuptools come with the venv
        requirements = [Requirement(text) for text in importlib.metadata.requires(name) or []]
        needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
        found[name] = [
            r for r in needed if not r.name.startswith(("nvidia-", "cuda-")) and r.name != "triton"
        ]
        todo += [requirement.name for requirement in found[name]]
    return found


def _relaxed(requirement: Requirement) -> str:
    """The image's host accepts the image's Transformers, which is newer than what the host here accepts."""
    return "transformers<=5.8.0" if requirement.name == "transformers" else str(requirement)


def _write_metadata(site: Path, name: str, version: str, requirements: list[str]) -> None:
    folder = site / f"{re.sub('[-.]+', '_', name)}-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (folder / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "INSTALLER").write_text("pip\n", encoding="utf-8")
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n", encoding="utf-8")


def run(command: list[str], cwd: Path | None = None) -> str:
    """Run a command where the simulated NPU is not installed, and return its stdout.

    Raises:
        AssertionError: the command failed; all of its output is in the message.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=env)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
