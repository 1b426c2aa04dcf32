"""The training: our callbacks go into the Trainer, its last save and the end of the run come out."""

from collections.abc import Callable
from typing import Any

from llamafactory_ascend import log, plugins, run
from llamafactory_ascend.launching import ownership
from llamafactory_ascend.patching import ANYTHING, Patch, Target
from llamafactory_ascend.report import lifecycle


def init(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Add the plugins' callbacks to a Trainer of a run that came through the host."""
    original(trainer, *args, **kwargs)
    now = run.current()
    if now.arguments is None:
        return  # a Trainer of somebody else's program
    judge_patches(now)
    for callbacks in plugins.manager().hook.ascend_trainer_callbacks(run=now, trainer=trainer):
        for callback in callbacks:
            trainer.add_callback(callback)
    report = lifecycle.current()
    if report is not None:
        from llamafactory_ascend.report.callback import ReportCallback

        trainer.add_callback(plugins.guard_callback("report", ReportCallback(report)))


def judge_patches(now: run.Run) -> None:
    """Say which patches do not stand, and which stand on a source they were not tested with.

    Raises:
        AscendError: one does not stand although the recipe asks for what it does, or is strict.
    """
    now.ledger.verify()
    for record in now.ledger.misses():
        reason = record.reason or "its module was never complete"
        now.miss(
            record.patch.feature,
            f"patch {record.patch.id} is not in place: {reason}",
            "llamafactory-ascend doctor",
        )
    untested = [record.patch.id for record in now.ledger.untested()]
    if untested:
        now.find(
            "warning",
            "host",
            f"{len(untested)} patches stand on a source of the host that they were not tested with: "
            f"{', '.join(untested)} (llamafactory-ascend doctor)",
        )


def training_function(original: Callable[..., None], config: dict[str, Any]) -> None:
    """Record how the run ended, here and in a Ray worker; an exception travels on."""
    with ownership.ending():
        try:
            original(config)
        except BaseException as error:
            _record(lifecycle.failed, error)
            raise
        _record(lifecycle.finished)


def _record(end: Callable[..., None], *args: BaseException) -> None:
    try:
        end(*args)
    except Exception as problem:  # it must not cover the cause of a failure, nor fail a run that went well
        log.warn(
            f"the end of the run could not be recorded: {type(problem).__name__}: {problem}", every_rank=True
        )


def save_state(original: Callable[..., None], trainer: Any) -> None:
    """Every stage calls this once its last model is saved: the place to judge what was saved."""
    original(trainer)
    now = run.current()
    if now.arguments is not None:
        try:
            plugins.manager().hook.ascend_saved(run=now, trainer=trainer)
        finally:  # every rank comes here, whatever a plugin found, so the report can be gathered
            now.attempt("the run report", lifecycle.saved)


PATCHES = [
    Patch(
        id="trainer.init",
        targets=(Target("transformers.trainer", "Trainer.__init__"),),
        around=init,
        parameters=("self", ANYTHING),
        why="`llamafactory-cli` passes no callbacks, and every stage's trainer derives from this class.",
        remove_when="the host takes callbacks from plugins",
        tested={"f926abcc6ea7": "transformers 5.6.0 and 5.8.0"},
    ),
    Patch(
        id="training.run",
        targets=(Target("llamafactory.train.tuner", "_training_function"),),
        around=training_function,
        parameters=("config",),
        why="No callback is told of the exception that ends a run, before, in or after its training.",
        remove_when="the host has a hook for the end of a run",
        tested={"73d6585e4355": "llamafactory 0.9.5", "d11dd55194ca": "llamafactory-kt 0.9.6.dev0"},
    ),
    Patch(
        id="trainer.save_state",
        targets=(Target("transformers.trainer", "Trainer.save_state"),),
        around=save_state,
        parameters=("self",),
        why="No callback comes after the last save, so nobody looks whether an adapter was written.",
        remove_when="Transformers has a callback after the last save",
        tested={"df50efbfb935": "transformers 5.6.0 and 5.8.0"},
    ),
]
