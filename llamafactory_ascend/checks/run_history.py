"""What a training logged: how far it came, and whether loss and gradients stayed numbers."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

STATE = "trainer_state.json"  # the Trainer's; in a checkpoint, and in output_dir after the last step
LOG = "trainer_log.jsonl"  # the host's, a line as soon as it is logged


class Entry(BaseModel):
    """What is logged at a step; of an evaluation the losses are extra fields, one for each data set."""

    model_config = ConfigDict(extra="allow")

    step: int
    loss: float | None = None
    grad_norm: float | None = None

    def values(self) -> dict[str, float]:
        """Return what must be a number: loss, gradient norm, the losses of an evaluation."""
        named = {"loss": self.loss, "grad_norm": self.grad_norm, **(self.model_extra or {})}
        return {
            name: value
            for name, value in named.items()
            if isinstance(value, float) and (name in Entry.model_fields or _is_evaluation(name))
        }


def _is_evaluation(name: str) -> bool:
    return name.startswith("eval_") and name.endswith("_loss")


def _with_step(entries: Any) -> Any:
    """Leave out what was logged outside a step."""
    if not isinstance(entries, list):
        return entries
    return [entry for entry in entries if not (isinstance(entry, dict) and "step" not in entry)]


class TrainerState(BaseModel):
    """What is read of the Trainer's state."""

    global_step: int
    max_steps: int
    log_history: Annotated[list[Entry], BeforeValidator(_with_step)] = []
    stateful_callbacks: dict[str, Any] = {}

    def gave_up(self) -> bool:
        """True where the callback for early stopping has no patience left."""
        with contextlib.suppress(KeyError, TypeError):
            found = self.stateful_callbacks["EarlyStoppingCallback"]
            patience = found["args"]["early_stopping_patience"]
            return bool(found["attributes"]["early_stopping_patience_counter"] >= patience)
        return False


class Line(Entry):
    """A line of the host's log. An evaluation counts its batches, in lines without an epoch, and logs its
    loss at step 0."""

    step: int = Field(alias="current_steps", gt=0)
    epoch: float
    total_steps: int | None = None


@dataclass(frozen=True)
class History:
    """The log of one training.

    Attributes:
        step: the last one that is known of.
        max_steps: what the Trainer set out for, None where nothing says so.
        entries: as the Trainer logs them.
        stopped_early: the host's `early_stopping_steps` has ended it.
        others: the step at which trainer_log.jsonl ends where trainer_state.json is at another, else None.
        flaw: why trainer_state.json cannot be read, "" where it can or where there is none.
    """

    step: int = 0
    max_steps: int | None = None
    entries: tuple[Entry, ...] = ()
    stopped_early: bool = False
    others: int | None = None
    flaw: str = ""


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the first one first."""
    named = (path for path in folder.glob("checkpoint-*") if path.is_dir())
    found = [path for path in named if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def read(folder: Path) -> History:
    """Read the history of the training that has this ``output_dir``; an empty one where there is none.

    A run that has died has no state of the Trainer beyond its last checkpoint; the host's own log, which has
    no gradient norms, goes on from there.
    """
    final, flaw = _state(folder / STATE)
    states = (_state(path / STATE)[0] for path in reversed(checkpoints(folder)))
    state = final or next((found for found in states if found), None)
    step, logged = state.global_step if state else 0, _log(folder / LOG)
    entries: list[Entry] = list(state.log_history) if state else []
    last = logged[-1].step if logged else step
    if not final:
        entries += [entry for entry in logged if entry.step > step]
    total = state.max_steps if state else logged[-1].total_steps if logged else None
    others = last if final and last != step else None
    gave_up = state is not None and state.gave_up()
    return History(step if final else max(step, last), total, tuple(entries), gave_up, others, flaw)


def judge(entries: Sequence[Entry]) -> tuple[list[str], list[str]]:
    """Return (problems, warnings) of the logged values.

    Weights that have become NaN never recover, so what counts is how the log ends: a gradient scaler's
    overflow in between is none.
    """
    problems: list[str] = []
    warnings: list[str] = []
    logged: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        for name, value in entry.values().items():
            logged.setdefault(name, []).append((entry.step, value))
    for name, values in logged.items():
        bad = [step for step, value in values if not math.isfinite(value)]
        if bad:
            text = f"{name} is not finite at {len(bad)} of {len(values)} logged steps, first at step {bad[0]}"
            (problems if bad[-1] == values[-1][0] else warnings).append(text)
    losses = [entry for entry in entries if entry.loss is not None]
    zero = [entry.step for entry in losses if _learns_nothing(entry)]
    if zero:
        text = (
            f"loss is 0 at {len(zero)} of {len(losses)} logged steps, first at step {zero[0]}: no row has "
            "labels, or the Trainer has left a NaN out of the mean"
        )
        (problems if zero[-1] == losses[-1].step else warnings).append(text)
    return problems, warnings


def _learns_nothing(entry: Entry) -> bool:
    """True for a loss of exactly 0; a preference loss can be, and older Trainers round what has gradients."""
    preference = {"rewards/accuracies", "accuracy"} & set(entry.model_extra or {})
    norm = entry.grad_norm
    return entry.loss == 0 and not preference and not (norm is not None and 0 < norm < math.inf)


def _state(path: Path) -> tuple[TrainerState | None, str]:
    """Return a state of the Trainer, None where there is none, and why it cannot be read."""
    try:
        return TrainerState.model_validate_json(path.read_bytes()), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, ValidationError) as error:
        return None, explain(path, error)


def explain(path: Path, error: OSError | ValidationError) -> str:
    """Say why a file cannot be read, in a sentence."""
    if isinstance(error, OSError):
        return f"{path} cannot be read: {error.strerror}"
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{path} cannot be read: {f'`{place}`: ' if place else ''}{first['msg']}"


def _log(path: Path) -> list[Line]:
    """Return the lines of the last run that wrote to the host's log."""
    found: list[Line] = []
    for line in _lines(path):
        if found and line.step < found[-1].step:
            found = []  # a run that started anew in the same folder
        found.append(line)
    return found


def _lines(path: Path) -> Iterator[Line]:
    with contextlib.suppress(OSError):
        for text in path.read_bytes().splitlines():
            with contextlib.suppress(ValidationError):  # an evaluation's; or cut off by a kill
                yield Line.model_validate_json(text)
