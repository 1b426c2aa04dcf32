"""Other versions of Transformers, installed beside the one of the environment."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement


def install(version: str, root: Path) -> Path:
    """Install a version of Transformers, and those of its requirements that the environment does not meet.

    Args:
        version: a version, or "newest".
        root: the folder of all of them; a version that is complete there is left as it is.

    Returns:
        The folder to put in front of the path.
    """
    folder = root / version
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{version}.lock"):
        if not (folder / "complete").exists():
            pip("transformers" if version == "newest" else f"transformers=={version}", folder)
            (distribution,) = importlib.metadata.distributions(name="transformers", path=[str(folder)])
            for requirement in map(Requirement, distribution.requires or []):
                if requirement.marker is None and not met(requirement):
                    pip(f"{requirement.name}{requirement.specifier}", folder)
            (folder / "complete").touch()
    return folder


def met(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def pip(what: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), what]
    subprocess.run(command, check=True)
