"""Stopping: SIGTERM or Ctrl-C ends a training after the step it is in, with a checkpoint of that step.

All ranks must leave at the same step, and a signal reaches one before another: what each has heard is
compared at the end of every step, in one all-reduce of two integers. The same one carries rank 0's clock, by
which a run that would save nothing before its end is saved every half hour; see ``timed_checkpoints``.
"""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.launching import signals

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.run import Arguments, Run


def agree(asked: int, due: bool, device: torch.device) -> tuple[int, bool]:
    """Return the highest signal number that any rank has heard, and whether any says that a save is due.

    Args:
        asked: the signal this rank has heard, 0 if none.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return asked, due
    both = torch.tensor([asked, int(due)], dtype=torch.int32, device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    found = both.tolist()
    return found[0], bool(found[1])


class Saved:
    """What can be resumed from: the last step that was saved, and where."""

    def __init__(self, output_dir: str, resumable: bool) -> None:
        self.folder, self.resumable = Path(output_dir), resumable
        self.step = 0

    def sentence(self, step: int) -> str:
        """Say how to go on after a stop at ``step``."""
        folder = self.folder / f"checkpoint-{self.step}"
        if self.step != step:
            return f"no checkpoint of step {step} was saved"
        if not self.resumable:
            return f"{folder} is saved, without what a resumed run needs (`save_only_model: true`)"
        return f"{folder} is saved, and the same command resumes from it"


def is_ppo(run: "Run") -> bool:
    """True for the one trainer with a loop of its own, which saves nothing that a stop asks for."""
    return run.arguments is not None and run.arguments.finetuning.stage == "ppo"


@hookimpl(tryfirst=True)  # the others may look at data for long
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    signals.requests.listen()


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    assert run.arguments is not None
    if not run.arguments.training.do_train:
        return []
    from llamafactory_ascend.features.stopping_callback import Stopping

    return [Stopping(run, trainer)]


@hookimpl
def ascend_saved(run: "Run", trainer: "Trainer") -> None:
    """Stop for a signal that came while the last model was saved; from here on one stops at once."""
    signum, _ = agree(signals.requests.signum, False, trainer.args.device)
    signals.requests.signum = signum
    if signum:
        where = trainer.args.output_dir
        name = signal.Signals(signum).name
        raise signals.stop(signum, f"{name}: stopped once the model was saved in {where}")
    signals.requests.listen()
