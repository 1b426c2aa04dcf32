"""A line of JSON every few steps, in `steplog.jsonl` beside the model: what a dashboard can follow.

ascend:
  plugins:
    steplog: {every: 10}
"""

import json
import time
from pathlib import Path
from typing import Any

from llamafactory_ascend import hookimpl
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.run import Arguments, Finding, Run

NAME = "steplog"
FILE = "steplog.jsonl"


def every(run: Run) -> int:
    """Return the setting `every`, 10 where there is none."""
    settings = run.settings.plugins.get(NAME, {})
    unknown = sorted(set(settings) - {"every"})
    found = settings.get("every", 10)
    if unknown or not isinstance(found, int) or found < 1:
        raise AscendError(
            f"ascend.plugins.{NAME} is {settings}", f"write `{NAME}: {{every: 10}}`, a number of steps"
        )
    return found


@hookimpl
def ascend_preflight(run: Run, arguments: Arguments) -> list[Finding]:
    """Refuse settings that cannot be, and say where the losses in the file will be stale."""
    if arguments.training.logging_steps > every(run):
        message = f"the loss is new every {arguments.training.logging_steps} steps only (logging_steps)"
        return [Finding("warning", NAME, message)]
    return []


@hookimpl
def ascend_trainer_callbacks(run: Run, trainer: Any) -> list[Any]:
    """Write a line every few steps, on one rank."""
    from transformers import TrainerCallback

    class StepLog(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = time.monotonic()
            run.facts[NAME] = {"every": every(run), "lines": 0}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % every(run) or not state.is_world_process_zero:
                return
            losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
            seconds = round(time.monotonic() - self.started, 3)
            line = {"step": state.global_step, "loss": losses[-1] if losses else None, "seconds": seconds}
            with (Path(args.output_dir) / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            run.facts[NAME]["lines"] += 1

    return [StepLog()]


@hookimpl
def ascend_report_sections(run: Run) -> dict[str, Any]:
    """Say in the run report how many lines this rank has written."""
    return {NAME: run.facts.get(NAME)}
