"""What a training logged: how far it came, and whether loss and gradients stayed numbers."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE = "trainer_state.json"  # the Trainer's; in a checkpoint, and in output_dir after the last step
LOG = "trainer_log.jsonl"  # the host's, a line as soon as it is logged
FINITE = ("loss", "grad_norm", "eval_loss")
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class History:
    """The log of one training.

    Attributes:
        step: the last one that is known of.
        max_steps: what the Trainer set out for, None where nothing says so.
        entries: as the Trainer logs them, `step` in each.
        stopped_early: the host's `early_stopping_steps` has ended it.
        others: the step at which trainer_log.jsonl ends where trainer_state.json is at another, else None.
    """

    step: int = 0
    max_steps: int | None = None
    entries: tuple[Entry, ...] = ()
    stopped_early: bool = False
    others: int | None = None


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the first one first."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def read(folder: Path) -> History:
    """Read the history of the training that has this ``output_dir``; an empty one where there is none.

    A run that has died has no state of the Trainer beyond its last checkpoint; the host's own log, which has
    no gradient norms, goes on from there.
    """
    final = _mapping(folder / STATE)
    states = (_mapping(path / STATE) for path in reversed(checkpoints(folder)))
    state = final or next((found for found in states if found), {})
    step, logged = int(state.get("global_step", 0)), _log(folder / LOG)
    entries = [entry for entry in state.get("log_history", []) if "step" in entry]
    last = int(logged[-1]["step"]) if logged else step
    if not final:
        entries += [entry for entry in logged if entry["step"] > step]
    total = state.get("max_steps") or (logged[-1].get("total_steps") if logged else None)
    others = last if final and last != step else None
    return History(step if final else max(step, last), total, tuple(entries), _gave_up(state), others)


def judge(entries: Sequence[Entry]) -> tuple[list[str], list[str]]:
    """Return (problems, warnings) of the logged values.

    Weights that have become NaN never recover, so what counts is how the log ends: a gradient scaler's
    overflow in between is none.
    """
    problems: list[str] = []
    warnings: list[str] = []
    for key in FINITE:
        steps = [entry["step"] for entry in entries if key in entry]
        bad = [entry["step"] for entry in entries if key in entry and not math.isfinite(entry[key])]
        if bad:
            text = f"{key} is not finite at {len(bad)} of {len(steps)} logged steps, first at step {bad[0]}"
            (problems if bad[-1] == steps[-1] else warnings).append(text)
    losses = [entry for entry in entries if "loss" in entry]
    zero = [entry["step"] for entry in losses if _learns_nothing(entry)]
    if zero:
        text = (
            f"loss is 0 at {len(zero)} of {len(losses)} logged steps, first at step {zero[0]}: no row has "
            "labels, or the Trainer has left a NaN out of the mean"
        )
        (problems if zero[-1] == losses[-1]["step"] else warnings).append(text)
    return problems, warnings


def _learns_nothing(entry: Entry) -> bool:
    """True for a loss of exactly 0; a preference loss can be, and older Trainers round what has gradients."""
    preference = "rewards/accuracies" in entry or "accuracy" in entry
    norm = entry.get("grad_norm")
    return entry["loss"] == 0 and not preference and not (norm is not None and 0 < norm < math.inf)


def _gave_up(state: Mapping[str, Any]) -> bool:
    """True where the callback for early stopping has no patience left."""
    found = (state.get("stateful_callbacks") or {}).get("EarlyStoppingCallback") or {}
    counter = (found.get("attributes") or {}).get("early_stopping_patience_counter", 0)
    patience = (found.get("args") or {}).get("early_stopping_patience")
    return patience is not None and counter >= patience


def _mapping(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the last run that wrote to the host's log, with the Trainer's word for the step."""
    found: list[dict[str, Any]] = []
    for line in _lines(path):
        if found and line["current_steps"] < found[-1]["step"]:
            found = []  # a run that started anew in the same folder
        found.append({**line, "step": line["current_steps"]})
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError):
        for text in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # cut off by a kill
                line = json.loads(text)
                # An evaluation counts its batches, in lines without an epoch, and logs its loss at step 0.
                if isinstance(line, dict) and "epoch" in line and line.get("current_steps", 0) > 0:
                    yield line
