"""Transformers' Trainer: our callbacks go in, its failures and its last word come out."""

from collections.abc import Callable
from typing import Any

from llamafactory_ascend import plugins, run
from llamafactory_ascend.patching import ANYTHING, Patch, Target
from llamafactory_ascend.report import lifecycle


def init(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Add the plugins' callbacks to a Trainer of a run that came through the host."""
    original(trainer, *args, **kwargs)
    now = run.current()
    if now.arguments is None:
        return  # a Trainer of somebody else's program
    now.ledger.verify()
    for record in now.ledger.misses():
        now.miss(
            record.patch.feature,
            f"patch {record.patch.id} is not in place: {record.reason or 'its module was never complete'}",
            "llamafactory-ascend doctor",
        )
    for callbacks in plugins.manager().hook.ascend_trainer_callbacks(run=now, trainer=trainer):
        for callback in callbacks:
            trainer.add_callback(callback)
    report = lifecycle.current()
    if report is not None:
        from llamafactory_ascend.report.callback import ReportCallback

        trainer.add_callback(ReportCallback(report))


def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Record what ended the training before the exception travels on."""
    try:
        return original(trainer, *args, **kwargs)
    except BaseException as error:
        lifecycle.failed(error)
        raise


def save_state(original: Callable[..., None], trainer: Any) -> None:
    """Every stage calls this once its last model is saved: the place to judge what was saved."""
    original(trainer)
    if run.current().arguments is not None:
        lifecycle.saved()


PATCHES = [
    Patch(
        id="trainer.init",
        targets=(Target("transformers.trainer", "Trainer.__init__"),),
        around=init,
        parameters=("self", ANYTHING),
        why="`llamafactory-cli` passes no callbacks, and every stage's trainer derives from this class.",
        remove_when="the host takes callbacks from plugins",
    ),
    Patch(
        id="trainer.train",
        targets=(Target("transformers.trainer", "Trainer.train"),),
        around=train,
        parameters=("self", ANYTHING),
        why="A callback is not told of the exception that ends a training.",
        remove_when="Transformers has a callback for it",
    ),
    Patch(
        id="trainer.save_state",
        targets=(Target("transformers.trainer", "Trainer.save_state"),),
        around=save_state,
        parameters=("self",),
        why="No callback comes after the last save, so nobody looks whether an adapter was written.",
        remove_when="Transformers has a callback after the last save",
    ),
]
