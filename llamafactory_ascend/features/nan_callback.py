"""The guard against NaN in the Trainer: it hears of checkpoints, and is found by its class."""

from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback

from llamafactory_ascend.features.nan_guard import NanGuard


class NanCallback(TrainerCallback):  # type: ignore[misc]
    """Carries the guard of a training. Events cannot end a run, so the host's seam judges the steps."""

    def __init__(self, guard: NanGuard) -> None:
        self.guard = guard
        self.loss_before = 0.0  # the logged sum of losses, as the last step left it

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.guard.saved = f"{args.output_dir}/checkpoint-{state.global_step}"


def of(callbacks: Iterable[Any]) -> NanCallback | None:
    """Return the one among a Trainer's callbacks, None where there is none."""
    return next((callback for callback in callbacks if isinstance(callback, NanCallback)), None)
