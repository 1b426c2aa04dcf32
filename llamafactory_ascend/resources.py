"""Recipes and demo data that travel with the package, from a wheel and from an editable checkout alike."""

import importlib.resources
from importlib.resources.abc import Traversable
from pathlib import Path


def folder(name: str) -> Traversable:
    """Return the shipped folder ``recipes`` or ``dataset_info``.

    A wheel holds it inside the package; an editable install points at a checkout, where it lies beside it.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    package = importlib.resources.files("llamafactory_ascend")
    inside = package / name
    if inside.is_dir():
        return inside
    beside = Path(str(package)).parent / name
    if beside.is_dir():
        return beside
    raise FileNotFoundError(
        f"{inside} is not there: the installation of llamafactory-ascend-plugin is incomplete, reinstall it"
    )


def recipes() -> dict[str, Traversable]:
    """Return name -> file of every shipped recipe, sorted by name."""
    files = sorted(folder("recipes").iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}
