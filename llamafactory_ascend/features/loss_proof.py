"""Proof of the chunked loss: it was computed in the first step of a training."""

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from llamafactory_ascend.features.chunked_loss import ChunkedLoss
    from llamafactory_ascend.run import Run


class LossProof(TrainerCallback):  # type: ignore[misc]
    """Counts the calls of the first step, and warns of a model that found another way to its loss."""

    def __init__(self, run: "Run", loss: "ChunkedLoss") -> None:
        self.run, self.loss = run, loss
        self.before = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.facts.pop("loss", None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "loss" not in self.run.facts:  # not before: a full-size step has calls of its own
            self.before = self.loss.calls

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "loss" in self.run.facts:
            return
        calls = self.loss.calls - self.before
        self.run.facts["loss"] = {"calls_in_first_step": calls}
        if not calls:
            self.run.miss(
                "loss", "the first step came to its loss by way of all logits, past the chunked one"
            )
