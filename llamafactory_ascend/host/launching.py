"""The launcher: settings are checked and the environment is filled before any rank is started."""

import os
import sys
from collections.abc import Callable
from typing import Any

from llamafactory_ascend import plugins, run, settings
from llamafactory_ascend.host.arguments import read_settings
from llamafactory_ascend.patching import Patch, Target


def launch(original: Callable[[], Any]) -> Any:
    """Check the recipe's ``ascend:`` block once, before torchrun multiplies its traceback by the ranks."""
    command = sys.argv[1] if len(sys.argv) > 1 else "help"
    if command != "train":
        return original()
    run.current().settings = read_settings(settings.take(_recipe(sys.argv[2:]))[1])
    for defaults in plugins.manager().hook.ascend_environment(command=command):
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
    return original()


def _recipe(words: list[str]) -> Any:
    from llamafactory.hparams import parser as host

    saved, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        return host.read_args()
    finally:
        sys.argv = saved


PATCHES = [
    Patch(
        id="launcher.launch",
        targets=(Target("llamafactory.launcher", "launch"),),
        around=launch,
        parameters=(),
        why="Environment defaults of the device must be set before torchrun starts the ranks.",
        remove_when="the host offers a hook before it launches",
    ),
]
