"""The host's choice of target modules: by substring; replaced where the recipe names exact ones."""

from collections.abc import Callable
from typing import Any

from llamafactory_ascend import run
from llamafactory_ascend.features import targets
from llamafactory_ascend.patching import Patch, Target


def patch_target_modules(
    original: Callable[..., Any], model: Any, finetuning_args: Any, target_modules: Any
) -> Any:
    """Return the modules of `ascend.targets` by their whole paths, or the host's choice without it.

    Every new adapter, LoRA or OFT, passes here, whatever kind of model it is for.
    """
    chosen = targets.choose(run.current(), model)
    return original(model, finetuning_args, target_modules) if chosen is None else chosen


def find_all_linear_modules(
    original: Callable[..., list[str]], model: Any, freeze_vision_tower: bool
) -> list[str]:
    """Spare a run with `ascend.targets` the host's list of all linear modules, which nothing would heed."""
    now = run.current()
    if now.settings.targets is not None and now.arguments is not None:
        return []
    return original(model, freeze_vision_tower)


PATCHES = [
    Patch(
        id="targets.modules",
        targets=(Target("llamafactory.model.model_utils.visual", "patch_target_modules"),),
        around=patch_target_modules,
        parameters=("model", "finetuning_args", "target_modules"),
        tested={"bef4cfeb4899": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
        why=(
            "Target modules are compared as substrings: `proj` also adapts every `q_proj`, and nothing can "
            "name one component or some blocks."
        ),
        remove_when="the host takes target modules by whole paths and blocks",
        feature="targets",
    ),
    Patch(
        id="targets.all_linear",
        targets=(Target("llamafactory.model.model_utils.misc", "find_all_linear_modules"),),
        around=find_all_linear_modules,
        parameters=("model", "freeze_vision_tower"),
        tested={"e29df7b16575": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
        why="With `ascend.targets` the log would still list all linear modules as found for adapters.",
        remove_when="patch targets.modules goes",
        feature="targets",
    ),
]
