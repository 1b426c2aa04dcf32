"""The report's ear in the Trainer."""

from typing import Any

from transformers import TrainerCallback

from llamafactory_ascend.report.lifecycle import Report


class ReportCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps the report up to date; added last, so that the other callbacks have spoken."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.first = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report.state = state
        self.report.write(max_steps=state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.first:  # every rank is here, and the other callbacks have judged the first step
            self.first = False
            self.report.gather()
        else:
            self.report.beat()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report.trained = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Within a training the sections wait for its end; an evaluation after it, or alone, has its own peak.
        if self.report.trained:
            self.report.gather()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.report.gather()
