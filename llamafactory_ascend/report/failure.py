"""What ended a run: the phase is read from the traceback, so nothing has to be tracked while training."""

import traceback
from typing import Any, Literal

from llamafactory_ascend import device

Phase = Literal["loading", "forward", "backward", "recompute", "optimizer", "evaluation", "saving", "other"]

# (phase, function name, end of the file name), the outermost concern first: an evaluation that runs a forward
# is an evaluation, a recomputation inside backward is a recomputation.
MARKS: tuple[tuple[Phase, set[str], str], ...] = (
    ("saving", {"save_model", "_save_checkpoint", "save_state"}, "transformers/trainer.py"),
    ("evaluation", {"evaluate", "evaluation_loop", "predict", "_evaluate"}, "transformers/trainer.py"),
    ("evaluation", {"evaluate", "predict"}, "transformers/trainer_seq2seq.py"),
    ("loading", {"load_model"}, "llamafactory/model/loader.py"),
    ("recompute", {"unpack_hook", "backward"}, "torch/utils/checkpoint.py"),
    ("backward", {"backward"}, "torch/_tensor.py"),
    ("backward", {"backward"}, "accelerate/accelerator.py"),
    ("optimizer", {"step"}, "torch/optim/lr_scheduler.py"),
    ("optimizer", {"step"}, "accelerate/optimizer.py"),
    ("optimizer", {"clip_grad_norm_"}, "accelerate/accelerator.py"),
    ("forward", {"compute_loss"}, ""),
)


def phase_of(error: BaseException) -> Phase:
    """Return the phase of a run in which an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    for phase, functions, file in MARKS:
        if any(frame.name in functions and frame.filename.endswith(file) for frame in frames):
            return phase
    return "other"


def describe(error: BaseException, rank: int, step: int, device_type: str) -> dict[str, Any]:
    """Return a failure as plain data: rank, step, phase, type, message, and memory in bytes if it ran out."""
    import torch

    found: dict[str, Any] = {
        "rank": rank,
        "step": step,
        "phase": phase_of(error),
        "type": type(error).__name__,
        "message": str(error).strip()[:2000],
    }
    if isinstance(error, torch.OutOfMemoryError):
        found["out_of_memory"] = True
        found["memory"] = device.memory(device_type)
    return found
