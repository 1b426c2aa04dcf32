"""Recipes and demo data that travel with the package, from a wheel and from an editable checkout alike."""

import difflib
import importlib.resources
from importlib.resources.abc import Traversable
from pathlib import Path

from llamafactory_ascend.errors import AscendError


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


def recipe(name: str) -> Path:
    """Return the file of a shipped recipe; its name may end with ``.yaml``.

    Raises:
        AscendError: there is none of that name; the nearest ones are in the message.
    """
    known = recipes()
    wanted = name.removesuffix(".yaml")
    if wanted in known:
        return Path(str(known[wanted]))
    near = [one for one in known if wanted in one] or difflib.get_close_matches(
        wanted, known, n=3, cutoff=0.4
    )
    raise AscendError(
        f"no recipe `{name}` is shipped"
        + (f": did you mean {' or '.join(f'`{one}`' for one in near[:3])}?" if near else ""),
        "llamafactory-ascend recipes ls",
    )
