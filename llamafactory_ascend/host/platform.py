"""The device before the host opens it: ranks and environment judged, the card bound, defaults made fit."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from llamafactory_ascend import device, run
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import devices, environment, precision
from llamafactory_ascend.patching import ANYTHING, Patch, Target
from llamafactory_ascend.settings import Settings

Words = dict[str, Any] | list[str]


def before_launch() -> None:
    """Refuse what no rank can survive, before the launcher starts any; only the number of cards is asked.

    Raises:
        AscendError: more ranks than cards, or an environment that HCCL or torch_npu cannot work with.
    """
    if device.is_installed():
        found = devices.judge_launch(device.count_visible(os.environ), os.environ)
        refuse([*found, *environment.judge(os.environ, **environment.loaded())])
        for finding in found:  # no rank sees these
            run.current().find(finding.level, finding.subject, finding.message)


def before_parsing(args: Words, settings: Settings) -> Words:
    """Judge a recipe in a rank, before TrainingArguments opens the device and stops at what it finds there.

    On a machine without torch_npu nothing is looked at, unless the recipe demands an NPU.

    Returns:
        The arguments, with defaults of the host replaced that do not fit HCCL.

    Raises:
        AscendError: no NPU where one is meant, more ranks than cards, bfloat16 on a SoC without it, ...
    """
    installed = device.is_installed()
    if not installed and settings.device != "npu":
        return args
    recipe = written(args)
    use_cpu = is_true(recipe.get("use_cpu")) or is_true(os.environ.get("ACCELERATE_USE_CPU"))
    if installed and not use_cpu:
        ranks = devices.local_ranks(os.environ)
        visible = device.count_visible(os.environ)
        refuse(devices.judge_ranks(ranks, "LOCAL_WORLD_SIZE", visible, os.environ))
        bound = device.bind(os.environ)
        if bound:
            run.current().decide("device.binding", bound, "LOCAL_RANK, before anything is allocated")
    found = device.Device("cpu", "CPU", 1, False, "asked for") if use_cpu else device.decide()
    refuse(devices.judge_presence(settings.device, installed, found, use_cpu))
    if found.type != "npu" or use_cpu:
        return args
    refuse([*environment.judge(os.environ, **environment.loaded()), *precision.judge(recipe, found)])
    return fit_timeout(args, recipe)


def fit_timeout(args: Words, recipe: Mapping[str, Any]) -> Words:
    """Return the arguments with a `ddp_timeout` that outlasts HCCL's own, where the user has set none."""
    if devices.number(os.environ.get("WORLD_SIZE", "")) < 2:
        return args
    least, now = environment.least_ddp_timeout(os.environ), run.current()
    if "ddp_timeout" in recipe:
        now.decide("ddp_timeout", str(recipe["ddp_timeout"]), f"set in the recipe; HCCL needs {least}")
        return args
    reason = "a minute more than HCCL waits in a collective (HCCL_EXEC_TIMEOUT)"
    now.decide("ddp_timeout", str(least), reason)
    return {**args, "ddp_timeout": least} if isinstance(args, dict) else [*args, "--ddp_timeout", str(least)]


def refuse(findings: list[run.Finding]) -> None:
    """Raise the errors among findings.

    Raises:
        AscendError: there is one.
    """
    if errors := [finding for finding in findings if finding.level == "error"]:
        raise AscendError("\n".join(finding.sentence() for finding in errors))


def written(args: Words) -> dict[str, Any]:
    """Return what somebody wrote, by key: a recipe, or command line words; a flag alone is "true"."""
    if isinstance(args, dict):
        return {key: value for key, value in args.items() if value is not None}
    found: dict[str, Any] = {}
    key = ""
    for word in args:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            key = name.replace("-", "_")
            found[key] = value if given else "true"
        elif key:
            found[key] = word
    return found


def is_true(value: Any) -> bool:
    """True for a switch that is on, in a recipe or in the environment."""
    return str(value).lower() in {"true", "yes", "on", "1"}


def log_save_evaluate(
    original: Callable[..., None], trainer: Any, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any
) -> None:
    """Judge a step before the Trainer logs and saves it: a checkpoint of NaN would push out a good one.

    Raises:
        AscendError: too many bad steps in a row.
    """
    from llamafactory_ascend.features import nan_callback

    found = nan_callback.of(trainer.callback_handler.callbacks)
    if found is None or grad_norm is None:
        original(trainer, tr_loss, grad_norm, *args, **kwargs)
        return
    state, loss = trainer.state, float(tr_loss)
    good = found.guard.judge(
        step=state.global_step,
        grad_norm=float(grad_norm),
        loss=loss - found.loss_before,
        skipped=was_skipped(trainer.accelerator, float(grad_norm)),
        last=state.global_step >= state.max_steps,
    )
    if not good:
        trainer.control.should_save = False
    original(trainer, tr_loss, grad_norm, *args, **kwargs)
    found.loss_before = float(tr_loss)


def was_skipped(accelerator: Any, grad_norm: float) -> bool:
    """True where a gradient scaler left the step out.

    Accelerate's own flag knows DeepSpeed's scaler, but not torch's beside a fused optimizer (the Trainer's
    default): that is called in any case, and leaves the step out itself.
    """
    scales = accelerator.scaler is not None and accelerator.scaler.is_enabled()
    return bool(accelerator.optimizer_step_was_skipped or (scales and not math.isfinite(grad_norm)))


PATCHES = [
    Patch(
        id="trainer.step",
        targets=(Target("transformers.trainer", "Trainer._maybe_log_save_evaluate"),),
        around=log_save_evaluate,
        parameters=("self", "tr_loss", "grad_norm", ANYTHING),
        tested={"af101534f0f7": "transformers 5.6.0 and 5.8.0"},
        why=(
            "No callback is told of a step's gradient norm, nor can it keep a step from being saved: a run "
            "whose gradients are NaN goes on to its end, and its checkpoints replace the good ones."
        ),
        remove_when="the Trainer stops, or has an event before it saves that knows loss and gradient norm",
    ),
]
