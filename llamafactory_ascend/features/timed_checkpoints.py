"""Checkpoints by the clock, for a run that would otherwise save nothing before its end.

The host's default is a checkpoint every 500 steps, and fine-tunings are often shorter: a kill in the last
hour loses everything. Where neither `save_strategy` nor `save_steps` is written, or what is written never
comes due before the last step, a checkpoint is saved every half hour; the next one replaces it, so that it
takes no more room than one.
"""

import contextlib
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamafactory_ascend import log

if TYPE_CHECKING:
    from llamafactory_ascend.run import Run

SECONDS = 1800.0
MARK = "ascend_timed_checkpoint"  # in a checkpoint that may go once there is a newer one
ROOM = 1.1  # free space, in sizes of the checkpoint before


def first_save(args: Any, state: Any) -> float:
    """Return the step of the first checkpoint the recipe leads to, infinity where none is foreseen."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "steps":
        return float(state.save_steps) if state.save_steps else float("inf")
    if strategy == "epoch" and state.num_train_epochs:
        return float(state.max_steps) / float(state.num_train_epochs)
    return float("inf")


def clock(run: "Run", args: Any, state: Any) -> "Clock | None":
    """Decide whether the run needs checkpoints by the clock."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    subject, every = "timed checkpoints", f"every {SECONDS / 60:.0f} min"
    written = {"save_strategy", "save_steps"} & run.given
    if run.arguments is None or run.arguments.finetuning.stage == "ppo":
        return None  # its loop saves by its own count alone
    first = first_save(args, state)
    if strategy == "no":
        run.decide(subject, "off", "`save_strategy: no`; SIGTERM and Ctrl-C save nevertheless")
        return None
    if strategy == "best":
        run.decide(subject, "off", "`save_strategy: best`")
        return None
    if not written:
        run.decide(subject, every, "neither `save_strategy` nor `save_steps` is written; they choose others")
    elif first >= state.max_steps:
        reason = f"`save_strategy: {strategy}` comes to nothing before the last step ({state.max_steps})"
        run.decide(subject, every, f"{reason}; `save_strategy: no` turns them off")
    else:
        run.decide(subject, "off", f"`save_strategy: {strategy}` saves first at step {first:.0f}")
        return None
    return Clock(Path(args.output_dir))


class Clock:
    """Knows when the last checkpoint was, and removes the one that a newer one replaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last = time.monotonic()
        self.step = 0  # of the save that is due to the clock alone
        self.size = 0

    def is_due(self, step: int) -> bool:
        """True where the last checkpoint is long ago and there is room for another."""
        if time.monotonic() - self.last < SECONDS:
            return False
        free = 0
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(self.folder).free
        if free < ROOM * self.size:
            log.warn(
                f"no checkpoint at step {step}: {free:,} bytes are free in {self.folder}, the last one "
                f"takes {self.size:,}"
            )
            self.last = time.monotonic()
            return False
        return True

    def save(self, control: Any, step: int) -> None:
        """Have this step saved, for the clock's sake alone where nothing else asks for it."""
        if not control.should_save:
            self.step = step
        control.should_save = True

    def saved(self, args: Any, state: Any) -> None:
        """A checkpoint is on disk: it replaces those that only the clock had asked for."""
        self.last = time.monotonic()
        if not args.should_save:
            return
        newest = self.folder / f"checkpoint-{state.global_step}"
        best = Path(state.best_model_checkpoint).name if state.best_model_checkpoint else ""
        with contextlib.suppress(OSError):  # nothing may fail here on one rank alone: the others would wait
            self.size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
            for mark in self.folder.glob(f"checkpoint-*/{MARK}"):
                if mark.parent != newest and mark.parent.name != best:
                    shutil.rmtree(mark.parent, ignore_errors=True)
            if self.step == state.global_step:
                (newest / MARK).write_text("the next checkpoint replaces this one\n", encoding="utf-8")
