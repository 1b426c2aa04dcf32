"""The launcher: settings are checked and the environment is filled before any rank is started."""

import sys
from collections.abc import Callable
from typing import Any

from llamafactory_ascend import settings
from llamafactory_ascend.host.arguments import (
    RECIPES,
    Words,
    fill_environment,
    mistakes_end_the_process,
    read_recipe,
    take_settings,
)
from llamafactory_ascend.patching import Patch, Target
from llamafactory_ascend.report import parent


def launch(original: Callable[[], Any]) -> Any:
    """Check the recipe's ``ascend:`` block once, before torchrun multiplies a mistake by the ranks."""
    if sys.argv[1:2] != ["train"]:
        return original()
    recipe = check(sys.argv[2:])
    fill_environment("train")
    with parent.watch(recipe):
        return original()


def check(words: list[str]) -> Words:
    """Read a command line and its settings; a mistake in these ends the process with exit code 2.

    Returns:
        What the host will read: a recipe with its overrides, or the words; [] if the recipe is unreadable.
    """
    found: Words = words
    if words and words[0].endswith(RECIPES):
        with mistakes_end_the_process():
            overrides = settings.as_overrides(words[1:])
        try:
            found = read_recipe([words[0], *overrides])
        except Exception:
            return []  # no such file, broken YAML: the host says so in its own words
    take_settings(found)
    return found


PATCHES = [
    Patch(
        id="launcher.launch",
        targets=(Target("llamafactory.launcher", "launch"),),
        around=launch,
        parameters=(),
        why="Environment defaults of the device must be set before torchrun starts the ranks.",
        remove_when="the host offers a hook before it launches",
        tested={"c696e9239335": "llamafactory 0.9.5", "f3df2beb964f": "llamafactory-kt 0.9.6.dev0"},
    ),
]
