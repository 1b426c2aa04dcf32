"""The launcher: before any rank starts, settings are checked, output_dir locked, the environment filled."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from llamafactory_ascend import log
from llamafactory_ascend.host import platform
from llamafactory_ascend.host.arguments import (
    Words,
    fill_environment,
    mistakes_end_the_process,
    names_recipe,
    read_recipe,
    resolve,
    take_settings,
)
from llamafactory_ascend.launching import ownership, torchrun
from llamafactory_ascend.patching import Patch, Target
from llamafactory_ascend.report import parent


def launch(original: Callable[[], Any]) -> Any:
    """Check the recipe's ``ascend:`` block once, before torchrun multiplies a mistake by the ranks."""
    if sys.argv[1:2] != ["train"]:
        return original()
    recipe = check(sys.argv[2:])
    warn_of_ranks()
    fill_environment("train")
    with mistakes_end_the_process():
        platform.before_launch()
    with parent.watch(recipe), ownership.ending():
        folder = parent.output_dir(recipe)
        if folder is not None and ownership.is_takers_turn(os.environ):
            with mistakes_end_the_process():
                ownership.take(folder)
        with torchrun_beside_python(sys.modules.get("llamafactory.launcher")):
            return original()


def warn_of_ranks() -> None:
    """Say that this process waits for others, where torchrun's variables are set before it is started."""
    if "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        log.warn(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} in the environment: one process trains with others "
            "that something else starts, and waits for them. If these variables are left over: unset RANK "
            "LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT",
            every_rank=True,
        )


def check(words: list[str]) -> Words:
    """Read a command line and its settings; a mistake in these ends the process with exit code 2.

    Returns:
        What the host will read: a recipe with its overrides, or the words; [] if the recipe is unreadable.
    """
    found: Words = words
    if names_recipe(words):
        words = resolve(words)
        try:
            found = read_recipe(words)
        except Exception:
            return []  # no such file, broken YAML: the host says so in its own words
    take_settings(found)
    return found


class Subprocess:
    """What the host's launcher sees as its module ``subprocess``: the same, but for the call of torchrun."""

    def __init__(self, script: str) -> None:
        self.script = script

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, command: Any, env: Any = None, check: bool = False, **other: Any) -> Any:
        """Run torchrun, found beside the running Python, with the words of this process as they are."""
        known = not other and not isinstance(command, str)
        meant = torchrun.words(command, self.script, sys.argv[1:]) if known else None
        if meant is None:
            log.warn(f"the host starts {command!r}, which is not the torchrun it is known to start: as it is")
            return subprocess.run(command, env=env, check=check, **other)
        code = torchrun.run(meant, env, ownership.handles())
        if check and code:
            raise subprocess.CalledProcessError(code, meant)
        return subprocess.CompletedProcess(meant, code)


@contextlib.contextmanager
def torchrun_beside_python(launcher: ModuleType | None) -> Iterator[None]:
    """Let the host's launcher start torchrun through us; no other module, and no PATH, is changed."""
    if getattr(launcher, "subprocess", None) is not subprocess:
        yield
        return
    assert launcher is not None and launcher.__file__ is not None
    launcher.subprocess = Subprocess(launcher.__file__)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        launcher.subprocess = subprocess  # type: ignore[attr-defined]


PATCHES = [
    Patch(
        id="launcher.launch",
        targets=(Target("llamafactory.launcher", "launch"),),
        around=launch,
        parameters=(),
        why=(
            "The environment must be filled and output_dir locked before torchrun starts the ranks. The host "
            "starts any torchrun on PATH, splits its words on blanks, and leaves it behind on SIGTERM."
        ),
        remove_when="the host offers a hook before it launches, and starts and stops its own torchrun",
        tested={"c696e9239335": "llamafactory 0.9.5", "f3df2beb964f": "llamafactory-kt 0.9.6.dev0"},
    ),
]
