"""A run whose gradients are no longer numbers ends, before a checkpoint of it takes a good one's place.

The host goes on to the last step: the Trainer leaves a loss that is NaN out of its mean
(`logging_nan_inf_filter`), so that `loss: 0.0` is logged for ever beside `grad_norm: nan`.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.resuming import checkpoint
from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.run import Run

# Optimizer steps in a row. One step with NaN gradients makes every trained weight NaN in Adam and SGD alike,
# so nothing is lost by stopping; an optimizer of its own that leaves such a step out has two more to recover.
BAD_STEPS = 3
# Steps in a row that the gradient scaler of fp16 left out. It halves its scale each time: from 65536 it is at
# 1 after 16, and at float16's smallest number, 2**-24, after 40, where no gradient can be left.
SKIPPED_STEPS = 40


@dataclass
class NanGuard:
    """Judges each optimizer step by its gradient norm and loss.

    Attributes:
        good: folder of the last checkpoint whose weights have made a good step since, "" where there is none.
        saved: folder of the last checkpoint; its weights are as yet untried where it is another.
        step: the last one judged.
        bad: bad steps in a row.
        skipped: steps in a row that the gradient scaler left out.
        first: the step with which the row of bad steps began, None while all is well.
        ruined: gradients of this row were not finite, and so are the weights; zeros leave them as they were.
        zero_is_bad: a step whose loss and gradients are exactly 0 has learnt nothing that a sound run knows.
    """

    good: str = ""
    saved: str = ""
    step: int = 0
    bad: int = 0
    skipped: int = 0
    first: int | None = None
    ruined: bool = False
    zero_is_bad: bool = True

    def judge(self, step: int, grad_norm: float, loss: float, skipped: bool, last: bool) -> bool:
        """Judge a step, once.

        Args:
            grad_norm: of all ranks together, before clipping.
            loss: what the step added to the logged sum.
            skipped: the gradient scaler left the step out.
            last: the run ends with it.

        Returns:
            True where its weights may be saved.

        Raises:
            AscendError: the row of bad steps is long enough, or the run would end within it.
        """
        if step != self.step:
            self.step = step
            self._count(step, grad_norm, loss, skipped)
            if self.bad >= BAD_STEPS or self.skipped >= SKIPPED_STEPS or (last and self.ruined):
                raise AscendError(self._what(grad_norm, loss), self._hint())
        return self.first is None

    def _count(self, step: int, grad_norm: float, loss: float, skipped: bool) -> None:
        if skipped:
            self.skipped += 1
        elif math.isfinite(grad_norm) and not (self.zero_is_bad and grad_norm == 0 and loss == 0):
            self.bad = self.skipped = 0
            self.first, self.ruined = None, False
            self.good = self.saved
        else:
            self.skipped = 0
            self.bad += 1
            self.first = self.first or step
            self.ruined = self.ruined or not math.isfinite(grad_norm)

    def _what(self, grad_norm: float, loss: float) -> str:
        if self.skipped >= SKIPPED_STEPS:
            return (
                f"step {self.step}: the gradients of {self.skipped} steps in a row overflowed in float16, so "
                "none of them has changed a weight"
            )
        row = f"of {self.bad} optimizer steps in a row" if self.bad > 1 else "of the last optimizer step"
        if math.isfinite(grad_norm):
            return f"step {self.step}: loss and gradients {row} are 0, from step {self.first} on"
        return (
            f"step {self.step}: the gradients {row} are not finite (grad_norm {grad_norm}), from step "
            f"{self.first} on. A loss of 0.0 in the log is a NaN that the Trainer leaves out of the mean"
        )

    def _hint(self) -> str:
        resume = (
            f"resume from {self.good}, the last checkpoint known to be good," if self.good else "start anew"
        )
        untried = f" ({self.saved} is not)" if self.saved != self.good else ""
        return (
            f"{resume} with a lower `learning_rate`, `max_grad_norm: 1.0`, `bf16: true` instead of fp16, or "
            "other data; `ascend: {kernels: off}` and `flash_attn: disabled` show whether a kernel is the "
            f"cause. No checkpoint was saved in bad steps{untried}"
        )


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    """Add what carries the guard of this training, on an NPU; its steps come through the host's seam."""
    assert run.arguments is not None
    training = run.arguments.training
    if training.device.type != "npu" or not training.do_train:
        return []
    from llamafactory_ascend.features.nan_callback import NanCallback

    finetuning = run.arguments.finetuning
    hinge = finetuning.stage == "dpo" and finetuning.pref_loss == "hinge"  # 0 once all pairs are far apart
    return [NanCallback(NanGuard(saved=str(checkpoint(training) or ""), zero_is_bad=not hinge))]
