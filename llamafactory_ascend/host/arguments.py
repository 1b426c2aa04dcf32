"""Arguments: the ``ascend:`` block leaves before the host's parser, the parsed result passes our hooks."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llamafactory_ascend import log, plugins, resources, run, settings
from llamafactory_ascend.checks import model_files
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.host import argument_types, platform
from llamafactory_ascend.host.versions import versions
from llamafactory_ascend.patching import Patch, Target

Words = dict[str, Any] | list[str]
RECIPES = (".yaml", ".yml", ".json")
SHIPPED = "ascend:"  # in place of a recipe's path: the shipped recipe of that name


def read_args(original: Callable[..., Words], args: Words | None = None) -> Words:
    """Read a recipe, or ``ascend:NAME``; ``--ascend.x y`` may follow it, and a JSON recipe works.

    0.9.5 passes a Path to ``json.load``, so that every JSON recipe dies with an AttributeError.
    """
    if args is not None or not names_recipe(sys.argv[1:]):
        return original(args)
    saved = sys.argv
    sys.argv = [saved[0], *resolve(saved[1:])]
    try:
        return read_recipe(sys.argv[1:]) if saved[1].endswith(".json") else original(None)
    finally:
        sys.argv = saved


def names_recipe(words: list[str]) -> bool:
    """True where a command line begins with a recipe: a file, or ``ascend:NAME``."""
    return bool(words) and (words[0].endswith(RECIPES) or words[0].startswith(SHIPPED))


def resolve(words: list[str]) -> list[str]:
    """Return a recipe and its overrides in the host's own form: a file first, ``ascend.x=y`` behind it.

    A name that is not shipped, or a word without a value, ends the process.
    """
    with mistakes_end_the_process():
        recipe, *overrides = words
        if recipe.startswith(SHIPPED):
            name = recipe.removeprefix(SHIPPED)
            recipe = str(resources.recipe(name))
            run.current().decide("recipe", name, f"a shipped recipe: {recipe}")
        return [recipe, *settings.as_overrides(overrides)]


def read_recipe(words: list[str]) -> dict[str, Any]:
    """Read a recipe and merge the overrides behind it, as the host does, without importing the host."""
    from omegaconf import OmegaConf

    path = Path(words[0])
    if path.suffix == ".json":
        recipe: Any = OmegaConf.create(json.loads(path.read_text(encoding="utf-8-sig")))
    else:
        recipe = OmegaConf.load(path)
    merged: Any = OmegaConf.to_container(OmegaConf.merge(recipe, OmegaConf.from_cli(words[1:])))
    return {str(key): value for key, value in merged.items()}


def parse_args(
    original: Callable[..., Any], parser: Any, args: Words | None = None, allow_extra_keys: bool = False
) -> Any:
    """Take our block out where every command (train, export, chat, a Ray worker) passes.

    The block stays in what ``read_args`` returned, because that is what the host sends to Ray workers.
    """
    from llamafactory.hparams import parser as host

    rest, found = take_settings(host.read_args(args))
    if isinstance(rest, dict):
        classes = getattr(parser, "dataclass_types", ())
        with mistakes_end_the_process():
            if classes and not allow_extra_keys:
                argument_types.refuse_unknown(classes, rest, recipe_name())
            argument_types.refuse(classes, rest, recipe_name())
    run.current().settings = found
    run.current().given = given_keys(rest)
    return original(parser, rest, allow_extra_keys)


def given_keys(args: Words) -> frozenset[str]:
    """Return the host's keys that somebody wrote: a default that is written down is a wish too."""
    if isinstance(args, dict):
        return frozenset(key for key, value in args.items() if value is not None)
    words = (word[2:].partition("=")[0] for word in args if word.startswith("--"))
    return frozenset(word.replace("-", "_") for word in words)


def get_args_v1(original: Callable[..., Any], args: Words | None = None) -> Any:
    """Take our block out for the host's v1 trainers (``USE_V1=1``), which the plugin does not change."""
    if args is None:
        words = sys.argv[1:]
        args = read_recipe(resolve(words)) if names_recipe(words) else words
    rest, found = take_settings(args)
    run.current().settings = found
    if found.model_fields_set:
        run.current().miss(
            "strict",
            "the v1 trainers of the host are not covered: the `ascend:` block has no effect",
            "unset USE_V1",
        )
    return original(rest)


def take_settings(args: Words) -> tuple[Words, settings.Settings]:
    """Split what was read into the host's arguments and our settings; a mistake in them ends the process."""
    recipe = recipe_name()
    with mistakes_end_the_process():
        rest, block = settings.take(args)
        found = settings.read(block, recipe, sys.argv[1:])
        plugins.check_names(found.plugins, lambda key: settings.place(key, recipe, sys.argv[1:]))
        return rest, found


def recipe_name() -> str:
    """Return what messages call the place where arguments were written."""
    return next((word for word in sys.argv[1:] if names_recipe([word])), "command line")


@contextlib.contextmanager
def mistakes_end_the_process() -> Iterator[None]:
    """Turn an AscendError into its message and exit code 2: no traceback, and nothing has been loaded."""
    try:
        yield
    except AscendError as error:
        log.warn(str(error))
        raise SystemExit(2) from None


def fill_environment(command: str) -> None:
    """Set the environment defaults of every plugin; what is already set stays, and both are recorded."""
    for defaults in plugins.manager().hook.ascend_environment(command=command):
        for name, value in defaults.items():
            found = os.environ.setdefault(name, value)
            reason = (
                "default of the plugin"
                if found == value
                else f"set in the environment; the default is {value}"
            )
            run.current().decide(f"environment.{name}", found, reason)


def get_train_args(original: Callable[..., Any], args: Words | None = None) -> Any:
    """Let the plugins adjust, judge or refuse a training run before its model is loaded."""
    from llamafactory.hparams import parser as host

    from llamafactory_ascend.launching import ownership
    from llamafactory_ascend.report import lifecycle

    now = run.current()
    # What this training decides from here on must not go when the report of an earlier one is closed.
    now.attempt("the run report", lifecycle.leave)
    # Again in every rank, before TrainingArguments opens the device: accelerate and Ray bypass the launcher.
    fill_environment("train")
    args = host.read_args(args)
    refuse_broken_model(platform.written(args).get("model_name_or_path"))
    parsed = original(platform.before_parsing(args, take_settings(args)[1]))
    now.judge_early_misses()
    now.arguments = arguments = run.Arguments(*parsed)
    log.info(f"active: {len(now.ledger.standing())} of {len(now.ledger.records)} patches are in place so far")
    ownership.take_in_rank(Path(arguments.training.output_dir))  # before anything in it is written
    now.attempt("the run report", lambda: lifecycle.begin(now, versions()))
    errors = [finding for finding in examine(now, arguments) if finding.level == "error"]
    if errors:
        raise AscendError("\n".join(finding.sentence() for finding in errors))
    return parsed


def refuse_broken_model(path: Any) -> None:
    """Look at the files of a local model before the host reads its configuration.

    Raises:
        AscendError: they cannot be read, there is no tokenizer, or no folder where only a path can be meant.
    """
    if isinstance(path, str) and model_files.is_missing(path):
        raise AscendError(f"there is no folder {path}", "correct `model_name_or_path`, or --model PATH")
    found = model_files.problems(Path(path).expanduser()) if isinstance(path, str) and path else []
    if found:
        raise AscendError("\n".join(found), "copy the model once more, all of its files")


def examine(now: run.Run, arguments: run.Arguments) -> list[run.Finding]:
    """Let the plugins adjust the arguments, then ask them what is worth knowing; what they find is recorded.

    Raises:
        AscendError: a plugin refuses the run.
    """
    hook = plugins.manager().hook
    hook.ascend_arguments(run=now, arguments=arguments)
    findings = [finding for found in hook.ascend_preflight(run=now, arguments=arguments) for finding in found]
    for finding in findings:
        if finding.level == "error":
            now.record(finding)  # whoever asked raises it, and then it is said
        else:
            now.find(finding.level, finding.subject, finding.message)
    return findings


PATCHES = [
    Patch(
        id="arguments.read",
        targets=(
            Target("llamafactory.extras.arguments", "read_args"),
            Target("llamafactory.hparams.parser", "read_args"),
        ),
        around=read_args,
        parameters=("args",),
        why="`--ascend.x y` after a recipe is read as two broken overrides; 0.9.5 cannot read JSON recipes.",
        remove_when="the host reads JSON recipes and has a namespace for plugins",
        tested={"873ee1d2573f": "llamafactory 0.9.5", "6fbd4c4653d2": "llamafactory-kt 0.9.6.dev0"},
    ),
    Patch(
        id="arguments.parse",
        targets=(Target("llamafactory.hparams.parser", "_parse_args"),),
        around=parse_args,
        parameters=("parser", "args", "allow_extra_keys"),
        why="The host's parser refuses keys it does not know, so the `ascend:` block has to leave before it.",
        remove_when="the host has a namespace for plugins",
        tested={"9be0738ee022": "llamafactory 0.9.5", "12a3b9182738": "llamafactory-kt 0.9.6.dev0"},
    ),
    Patch(
        id="arguments.parse_v1",
        targets=(Target("llamafactory.v1.config.arg_parser", "get_args"),),
        around=get_args_v1,
        parameters=("args",),
        why="The parser of the v1 trainers (`USE_V1=1`) refuses the `ascend:` block too.",
        remove_when="the host has a namespace for plugins",
        tested={"d1ca6154d28b": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
    ),
    Patch(
        id="arguments.train",
        targets=(Target("llamafactory.hparams.parser", "get_train_args"),),
        around=get_train_args,
        parameters=("args",),
        why="The host has no hook between parsing the arguments and loading the model.",
        remove_when="the host offers such a hook",
        tested={"2d64e1b1e382": "llamafactory 0.9.5", "1b847750f2fa": "llamafactory-kt 0.9.6.dev0"},
    ),
]
