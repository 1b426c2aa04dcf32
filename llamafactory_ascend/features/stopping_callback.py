"""The Trainer's side of ``stopping``."""

import signal
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from llamafactory_ascend import log
from llamafactory_ascend.features import timed_checkpoints
from llamafactory_ascend.features.stopping import Saved, agree, is_ppo
from llamafactory_ascend.launching import signals

if TYPE_CHECKING:
    from transformers import Trainer

    from llamafactory_ascend.run import Run


class Stopping(TrainerCallback):  # type: ignore[misc]
    """Compares what the ranks have heard, has the checkpoint saved and raises once it is."""

    def __init__(self, run: "Run", trainer: "Trainer") -> None:
        self.run = run
        self.signum = 0
        self.clock: timed_checkpoints.Clock | None = None
        self.training = False
        self.saved = Saved(trainer.args.output_dir, not trainer.args.save_only_model)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training, self.signum = True, 0
        self.clock = timed_checkpoints.clock(self.run, args, state)
        signals.requests.hold()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.look(args, state, control):
            control.should_evaluate = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training:  # it may have taken long, and the next step is none that must be waited for
            self.look(args, state, control)

    def look(self, args: Any, state: Any, control: Any) -> bool:
        """Have the step saved if that is asked for or due; True where the training stops after it."""
        clock = self.clock
        due = clock is not None and args.process_index == 0 and clock.is_due(state.global_step)
        self.signum, due = agree(signals.requests.signum, due, args.device)
        signals.requests.signum = self.signum  # what others have heard counts here too
        if due and clock is not None:
            clock.save(control, state.global_step)
        if self.signum:
            name = signal.Signals(self.signum).name
            log.info(f"{name}: stopping after step {state.global_step}, which is saved first")
            control.should_save = self.saved.step != state.global_step
            control.should_training_stop = True
        return bool(self.signum)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.step = state.global_step
        if self.clock is not None:
            self.clock.saved(args, state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.signum and self.saved.step == state.global_step:
            self.leave(state)
        if self.signum:  # `save_strategy: best` saves the best model only, where it has just evaluated
            control.should_save, control.should_evaluate = True, False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training = False
        if self.signum and not is_ppo(self.run):
            self.leave(state)

    def leave(self, state: Any) -> None:
        name = signal.Signals(self.signum).name
        how = self.saved.sentence(state.global_step)
        raise signals.stop(self.signum, f"{name}: stopped after step {state.global_step}; {how}")
