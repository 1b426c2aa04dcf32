"""Proof of the adapter while a run goes on: every checkpoint is checked once it is on disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from llamafactory_ascend.checks.adapter import check
from llamafactory_ascend.errors import AscendError

if TYPE_CHECKING:
    from llamafactory_ascend.run import Run


class AdapterProof(TrainerCallback):  # type: ignore[misc]
    """Checks checkpoints, and remembers whether anything can have been learned yet.

    Attributes:
        expected: key in the file -> shape, None where the model has no adapter that PEFT knows.
        trained: an optimizer step with a learning rate above 0 was made in this process.
    """

    def __init__(self, run: "Run", expected: Mapping[str, tuple[int, ...]] | None) -> None:
        self.run, self.expected, self.trained = run, expected, False
        self.pending: Path | None = None
        self.due = False  # a checkpoint was written, by this rank or by another
        self.scale = 0.0  # of the gradient scaler before the step

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if not self.trained:
            self.scale = scale_of(optimizer)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        # A warm-up starts at 0, and a gradient scaler skips steps whose gradients overflow.
        if not self.trained and optimizer is not None and not was_skipped(optimizer, self.scale):
            self.trained = any(float(group["lr"]) > 0 for group in optimizer.param_groups)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The host's reward and PPO trainers rewrite the files in an on_save that comes after this one.
        self.due = True
        if args.should_save:
            self.pending = Path(args.output_dir) / f"checkpoint-{state.global_step}"

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.judge()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.judge()

    def judge(self) -> None:
        """Check the checkpoint that was saved last; a broken one is an error finding.

        Raises:
            AscendError: `strict: true` and it is broken, on every rank: what follows would be lost time.
        """
        due, self.due = self.due, False
        broken = self.check_pending()
        if due and self.run.settings.strict:
            from llamafactory_ascend.features.adapter import not_whole
            from llamafactory_ascend.report.gathering import all_gather

            found = next((problems for problems in all_gather(broken) if problems), None)
            if found:
                raise AscendError(
                    not_whole(f"the adapter of {found[0]}", found[1]),
                    "resume from the last good checkpoint (see `checkpoints` in ascend_report.json), or "
                    "leave `ascend.strict` out to be told and go on",
                )

    def check_pending(self) -> tuple[str, list[str]] | None:
        """Return the checkpoint this rank has written and its problems; None if good, or already deleted."""
        folder, self.pending = self.pending, None
        if folder is None or not folder.is_dir():
            return None
        result = check(folder, self.expected, self.trained)
        section = self.run.facts.setdefault("adapter", {})
        section.setdefault("checkpoints", {})[folder.name] = {"ok": result.ok, "sha256": result.sha256}
        for problem in result.problems:
            self.run.find("error", "adapter", f"{folder.name}: {problem}")
        return (str(folder), list(result.problems)) if result.problems else None


def scale_of(optimizer: Any) -> float:
    """Return the factor of the gradient scaler beside an optimizer of Accelerate, 0 where there is none."""
    scaler = getattr(optimizer, "scaler", None)
    return 0.0 if scaler is None else float(scaler.get_scale())


def was_skipped(optimizer: Any, scale: float) -> bool:
    """True where a gradient scaler has left a step out, because gradients overflowed in float16.

    Accelerate's own flag knows DeepSpeed's scaler, but not torch's beside a fused optimizer (the Trainer's
    default): that one is called in any case and leaves the step out itself. The scale falls each time.

    Args:
        scale: before the step.
    """
    return bool(getattr(optimizer, "step_was_skipped", False)) or scale_of(optimizer) < scale
