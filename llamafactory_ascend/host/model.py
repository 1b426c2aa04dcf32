"""The model loader: hooks before and after the model of a training run is built."""

from collections.abc import Callable
from typing import Any

from llamafactory_ascend import plugins, run
from llamafactory_ascend.features import kernels
from llamafactory_ascend.patching import Patch, Target


def load_model(
    original: Callable[..., Any],
    tokenizer: Any,
    model_args: Any,
    finetuning_args: Any,
    is_trainable: bool = False,
    add_valuehead: bool = False,
) -> Any:
    """Call the plugins around the build of the model that is trained; reference and reward models of the same
    training get its kernels only."""
    now, hook = run.current(), plugins.manager().hook
    if not is_trainable or now.arguments is None:
        model = original(tokenizer, model_args, finetuning_args, is_trainable, add_valuehead)
        if now.arguments is not None and now.arguments.training.do_train:
            kernels.compute_alike(now, model)
        return model
    hook.ascend_before_model(run=now, arguments=now.arguments)
    model = original(tokenizer, model_args, finetuning_args, is_trainable, add_valuehead)
    hook.ascend_after_model(run=now, model=model)
    return model


PATCHES = [
    Patch(
        id="model.load",
        targets=(Target("llamafactory.model.loader", "load_model"),),
        around=load_model,
        parameters=("tokenizer", "model_args", "finetuning_args", "is_trainable", "add_valuehead"),
        why="The host has no hook around the build of the model.",
        remove_when="the host offers such a hook",
        tested={"90f2a445a1d0": "llamafactory 0.9.5", "4a20136d5a04": "llamafactory-kt 0.9.6.dev0"},
    ),
]
