"""What ended a run: the phase is read from the traceback, so nothing has to be tracked while training."""

import traceback
from collections.abc import Iterator
from typing import Any, Literal

from llamafactory_ascend import device
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.launching.signals import is_stop

Phase = Literal[
    "arguments", "dataset", "loading", "forward", "backward", "recompute", "optimizer",
    "evaluation", "saving", "callback", "other",
]  # fmt: skip
Mark = tuple[Phase, set[str], str]  # phase, names of functions, the end of their file's name

# The outermost of these that is on the stack decides: an evaluation that runs a forward is an evaluation.
OUTER: tuple[Mark, ...] = (
    ("arguments", {"get_train_args"}, "llamafactory/hparams/parser.py"),
    ("arguments", {"get_train_args"}, "llamafactory_ascend/host/arguments.py"),
    ("dataset", {"get_dataset"}, "llamafactory/data/loader.py"),
    ("dataset", {"get_batch_samples", "get_train_dataloader"}, "transformers/trainer.py"),
    ("loading", {"load_tokenizer", "load_config", "load_model"}, "llamafactory/model/loader.py"),
    ("loading", {"load_model"}, "llamafactory_ascend/host/model.py"),
    ("loading", {"__init__", "_prepare_for_training", "_load_from_checkpoint"}, "transformers/trainer.py"),
    ("loading", {"_load_best_model"}, "transformers/trainer.py"),
    ("evaluation", {"evaluate", "predict", "prediction_step"}, "transformers/trainer.py"),
    ("evaluation", {"evaluate", "predict"}, "transformers/trainer_seq2seq.py"),
    ("saving", {"save_model", "_save_checkpoint"}, "transformers/trainer.py"),
    ("saving", {"save_state"}, "transformers/trainer_pt_utils.py"),
    ("saving", {"create_modelcard_and_push"}, "llamafactory/train/trainer_utils.py"),
    ("saving", {"save_state"}, "llamafactory_ascend/host/trainer.py"),  # what was saved is judged there
    ("saving", {"judge"}, "llamafactory_ascend/features/adapter_proof.py"),
)
# Otherwise the innermost: a recomputation runs inside a backward, and a re-entrant one runs a backward.
INNER: tuple[Mark, ...] = (
    ("callback", {"call_event"}, "transformers/trainer_callback.py"),
    ("forward", {"training_step"}, "transformers/trainer.py"),  # inputs to the device, the loss scaled
    ("forward", {"compute_loss"}, "trainer.py"),
    ("forward", {"get_inputs", "get_rewards", "batched_forward_pass"}, "llamafactory/train/ppo/trainer.py"),
    ("backward", {"backward"}, "accelerate/accelerator.py"),
    ("backward", {"backward", "grad"}, "torch/autograd/__init__.py"),
    ("recompute", {"unpack_hook", "backward"}, "torch/utils/checkpoint.py"),
    ("optimizer", {"_clip_grad_norm", "_get_grad_norm"}, "transformers/trainer.py"),
    ("optimizer", {"step"}, "accelerate/optimizer.py"),
    ("optimizer", {"wrapper"}, "torch/optim/optimizer.py"),
)
TRACEBACK_CHARACTERS = 12_000


def phase_of(error: BaseException) -> Phase:
    """Return the phase of a run in which an exception was raised."""
    frames = [frame for link in _links(error) for frame in traceback.extract_tb(link.__traceback__)]
    return _first(frames, OUTER) or _first(frames[::-1], INNER) or "other"


def _first(frames: list[traceback.FrameSummary], marks: tuple[Mark, ...]) -> Phase | None:
    for frame in frames:
        for phase, functions, file in marks:
            if frame.name in functions and frame.filename.endswith(file):
                return phase
    return None


def _links(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and what it was raised from: their frames together are the whole stack.

    An exception it merely came after (``__context__``) counts if device memory ran out there: whatever a
    library makes of that, it is the cause.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        context = link.__context__
        link = link.__cause__ or (context if context is not None and ran_out_of_memory(context) else None)


def ran_out_of_memory(error: BaseException) -> bool:
    """True where this very exception says that device memory ran out.

    torch_npu has raised a RuntimeError or torch's OutOfMemoryError for it, depending on its version.
    """
    import torch

    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory. Tried to allocate" in str(error)
    )


def describe(error: BaseException, rank: int, step: int, device_type: str) -> dict[str, Any]:
    """Return a failure as plain data: what, where, on which rank, and memory in bytes if it ran out."""
    phase, message = phase_of(error), str(error).strip()[:4000]
    frames = traceback.extract_tb(error.__traceback__)
    text = "".join(traceback.format_exception(error))
    out_of_memory = next((link for link in _links(error) if ran_out_of_memory(link)), None)
    found: dict[str, Any] = {
        "rank": rank,
        "step": step,
        "phase": phase,
        "refused": phase == "arguments" and isinstance(error, AscendError),
        "stopped": is_stop(error),
        "type": type(error).__name__,
        "headline": (message.splitlines() or [""])[0][:300],
        "message": message,
        "where": f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "",
        "traceback": text[-TRACEBACK_CHARACTERS:],
        "out_of_memory": out_of_memory is not None,
        "memory": None,
    }
    if out_of_memory is not None:
        found["memory"] = device.memory(device_type)
        if out_of_memory is not error:
            found["headline"] += f" (caused by {type(out_of_memory).__name__}: {str(out_of_memory)[:200]})"
    return found


def out_of_memory_line(found: dict[str, Any]) -> str:
    """Return one sentence about a failure for lack of memory: phase, step, bytes."""
    where = f"out of device memory in {found['phase']} after step {found['step']}"
    memory = found["memory"]
    if not memory:
        return where
    return (
        f"{where}: {memory['allocated']:,} bytes allocated, {memory['reserved']:,} reserved "
        f"(peak {memory['peak_allocated']:,} and {memory['peak_reserved']:,})"
    )
