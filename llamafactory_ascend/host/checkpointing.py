"""The host's gradient checkpointing: re-entrant, trainable layers only; replaced by ours."""

import inspect
from collections.abc import Callable
from typing import Any

from llamafactory_ascend import run
from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.checkpointing_conflicts import parameters_come_and_go
from llamafactory_ascend.patching import Patch, Target


def gradient_checkpointing_enable(
    original: Callable[..., None],
    model: Any,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
    use_unsloth_gc: bool = False,
) -> None:
    """Enable our checkpointing each time anybody (the loader, the Trainer at train begin) enables it.

    Models of the old format (their class takes ``value``) have no function to replace; they, Unsloth,
    DeepSpeed ZeRO-3 and a recipe with ``ascend.checkpointing: off`` keep the host's.
    """
    now = run.current()
    old_format = "value" in inspect.signature(model._set_gradient_checkpointing).parameters
    others = use_unsloth_gc or parameters_come_and_go()
    if now.settings.checkpointing == "off" or others or not model.supports_gradient_checkpointing:
        original(model, gradient_checkpointing_kwargs, use_unsloth_gc)
    elif old_format:
        now.decide("checkpointing", "left to the host", f"{type(model).__name__} has the old format")
        original(model, gradient_checkpointing_kwargs, use_unsloth_gc)
    else:
        checkpointing.enable(model, **(gradient_checkpointing_kwargs or {}))


PATCHES = [
    Patch(
        id="checkpointing.enable",
        targets=(Target("llamafactory.model.model_utils.checkpointing", "_gradient_checkpointing_enable"),),
        around=gradient_checkpointing_enable,
        parameters=("self", "gradient_checkpointing_kwargs", "use_unsloth_gc"),
        tested={"0ad968847baf": "0.9.5 and 0.9.6.dev0"},
        why=(
            "Stock checkpoints only layers that own a trainable parameter; `gradient_checkpointing: true` "
            "turns them re-entrant as training begins, whatever `use_reentrant_gc` says."
        ),
        remove_when="the host checkpoints frozen layers in the backward path and defaults to non-re-entrant",
        upstream="https://github.com/huggingface/transformers/issues/28339",
        feature="checkpointing",
    ),
]
