"""Evaluations that want the loss alone: the Trainer asks its model for logits and drops them."""

from collections.abc import Callable
from typing import Any

from llamafactory_ascend.features import loss
from llamafactory_ascend.patching import Patch, Target


def prediction_step(
    original: Callable[..., Any],
    trainer: Any,
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    ignore_keys: list[str] | None = None,
) -> Any:
    """Compute the loss of an evaluation as that of the training, where nothing else is asked for."""
    from llamafactory_ascend.features.chunked_loss import only_the_loss

    with only_the_loss(loss.current(), prediction_loss_only):
        return original(trainer, model, inputs, prediction_loss_only, ignore_keys)


PATCHES = [
    Patch(
        id="trainer.prediction_step",
        targets=(Target("transformers.trainer", "Trainer.prediction_step"),),
        around=prediction_step,
        parameters=("self", "model", "inputs", "prediction_loss_only", "ignore_keys"),
        why="An evaluation without metrics makes the logits of all positions and drops them.",
        remove_when="Transformers computes the loss of an evaluation without logits",
        tested={"ac09d872efa2": "transformers 5.6.0 and 5.8.0"},
        feature="loss",
    ),
]
