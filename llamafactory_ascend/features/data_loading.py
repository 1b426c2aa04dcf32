"""The data loader on an NPU: no pinned memory unless asked for, no more workers than cores and batches.

Workers are forked, as on CUDA, after the device was opened: any other start method would pickle the host's
collator, which holds the model. They collate on the CPU and never touch the device.
"""

import math
import os
from typing import TYPE_CHECKING, Any

from llamafactory_ascend.features import devices
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.run import Arguments, Run

WORKERS, PREPROCESSING, PIN = "dataloader_num_workers", "preprocessing_num_workers", "dataloader_pin_memory"
UNSAFE = "a thread of the loader copies each batch into memory pinned for the NPU, which can crash or hang"


def cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cap(workers: int, cores: int, ranks: int = 1, batches: int | None = None) -> int:
    """Return how many of the workers are of use to each of the ranks of a node; one always is."""
    useful = max(1, cores // max(1, ranks))
    return min(workers, useful if batches is None else max(1, min(useful, batches)))


def batches_per_epoch(rows: int, batch_size: int, ranks: int) -> int:
    """Return how many batches each rank loads in an epoch."""
    return math.ceil(rows / (batch_size * ranks))


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    training, data = arguments.training, arguments.data
    if training.device.type != "npu":
        return
    if PIN not in run.given:
        training.dataloader_pin_memory = False
        run.decide(PIN, "false", f"the default on an NPU: {UNSAFE}")
    else:
        run.decide(PIN, str(training.dataloader_pin_memory).lower(), "set in the recipe")
    ranks = devices.local_ranks(os.environ)
    if training.dataloader_num_workers and not data.streaming:  # the number orders the rows of a stream
        useful = cap(training.dataloader_num_workers, cores(), ranks)
        reason = f"{ranks} ranks share {cores()} cores; workers are forked and stay off the device"
        _limit(run, training, WORKERS, useful, reason)
    if data.preprocessing_num_workers:
        reason = f"one rank of a node tokenises at a time, on {cores()} cores"
        _limit(run, data, PREPROCESSING, cap(data.preprocessing_num_workers, cores()), reason)


def _limit(run: "Run", holder: Any, name: str, useful: int, reason: str) -> None:
    asked = getattr(holder, name)
    setattr(holder, name, useful)
    run.decide(name, str(useful), reason if useful == asked else f"{asked} asked for; {reason}")


@hookimpl
def ascend_preflight(run: "Run", arguments: "Arguments") -> list[Finding]:
    training = arguments.training
    if training.device.type != "npu" or not training.dataloader_pin_memory:
        return []
    return [Finding("warning", PIN, f"`{PIN}: true`: {UNSAFE}; leave it out where a run dies after hours")]


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    """Limit the workers to the batches there are, now that the rows are known; no callback."""
    training, rows = trainer.args, trainer.train_dataset
    if training.device.type != "npu" or not training.dataloader_num_workers or not hasattr(rows, "__len__"):
        return []
    batches = batches_per_epoch(len(rows), training.per_device_train_batch_size, training.world_size)
    if batches < training.dataloader_num_workers:
        reason = f"{len(rows)} rows are {batches} batches for each of {training.world_size} ranks"
        _limit(run, training, WORKERS, max(1, batches), reason)
    return []
