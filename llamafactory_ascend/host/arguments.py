"""Arguments: the ``ascend:`` block leaves before the host's parser, and the parsed result passes our hooks."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamafactory_ascend import log, plugins, run, settings
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.host.versions import versions
from llamafactory_ascend.patching import Patch, Target

Words = dict[str, Any] | list[str]


def read_args(original: Callable[..., Words], args: Words | None = None) -> Words:
    """Read a recipe; ``--ascend.x y`` may follow it, and a JSON recipe works.

    0.9.5 passes a Path to ``json.load``, so that every JSON recipe dies with an AttributeError.
    """
    if args is None and len(sys.argv) > 1:
        if sys.argv[1].endswith((".yaml", ".yml", ".json")):
            sys.argv[2:] = settings.as_overrides(sys.argv[2:])
        if sys.argv[1].endswith(".json"):
            return _read_json(Path(sys.argv[1]), sys.argv[2:])
    return original(args)


def _read_json(path: Path, overrides: list[str]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    recipe = OmegaConf.create(json.loads(path.read_text(encoding="utf-8")))
    merged = OmegaConf.to_container(OmegaConf.merge(recipe, OmegaConf.from_cli(overrides)))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def parse_args(original: Callable[..., Any], parser: Any, args: Words | None = None, allow_extra_keys: bool = False) -> Any:
    """Take our block out where every command (train, export, chat, a Ray worker) passes.

    The block stays in what ``read_args`` returned, because that is what the host sends to Ray workers.
    """
    from llamafactory.hparams import parser as host

    rest, block = settings.take(host.read_args(args))
    run.current().settings = read_settings(block)
    return original(parser, rest, allow_extra_keys)


def read_settings(block: Any) -> settings.Settings:
    """Check the block; a mistake in it ends the process with exit code 2 before anything is loaded."""
    recipe = next((word for word in sys.argv[1:] if word.endswith((".yaml", ".yml", ".json"))), "command line")
    try:
        return settings.read(block, recipe)
    except AscendError as error:
        log.warn(str(error))
        raise SystemExit(2) from None


def get_train_args(original: Callable[..., Any], args: Words | None = None) -> Any:
    """Let the plugins adjust, judge or refuse a training run before its model is loaded."""
    from llamafactory_ascend.report import lifecycle

    parsed = original(args)
    now = run.current()
    now.arguments = arguments = run.Arguments(*parsed)
    hook = plugins.manager().hook
    lifecycle.begin(now, versions())
    hook.ascend_arguments(run=now, arguments=arguments)
    findings = [finding for found in hook.ascend_preflight(run=now, arguments=arguments) for finding in found]
    for finding in findings:
        now.find(finding.level, finding.subject, finding.message)
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise AscendError("\n".join(f"{finding.subject}: {finding.message}" for finding in errors))
    return parsed


PATCHES = [
    Patch(
        id="arguments.read",
        targets=(
            Target("llamafactory.extras.arguments", "read_args"),
            Target("llamafactory.hparams.parser", "read_args"),
        ),
        around=read_args,
        parameters=("args",),
        why="`--ascend.x y` after a recipe is read as two broken overrides, and 0.9.5 cannot read any JSON recipe.",
        remove_when="the host reads JSON recipes and has a namespace for plugins",
    ),
    Patch(
        id="arguments.parse",
        targets=(Target("llamafactory.hparams.parser", "_parse_args"),),
        around=parse_args,
        parameters=("parser", "args", "allow_extra_keys"),
        why="The host's parser refuses keys it does not know, so the `ascend:` block has to leave before it.",
        remove_when="the host has a namespace for plugins",
    ),
    Patch(
        id="arguments.train",
        targets=(Target("llamafactory.hparams.parser", "get_train_args"),),
        around=get_train_args,
        parameters=("args",),
        why="The host has no hook between parsing the arguments and loading the model.",
        remove_when="the host offers such a hook",
    ),
]
