"""The rows that a training is made of, in tokens before `cutoff_len`: between conversion and tokenizing."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from llamafactory_ascend import run
from llamafactory_ascend.checks.lengths.totals import Totals
from llamafactory_ascend.features import trained_lengths
from llamafactory_ascend.host.data import Encoder
from llamafactory_ascend.host.lengths import RowCounter
from llamafactory_ascend.patching import ANYTHING, Patch, Target

SECONDS = 2.0  # that the other ranks wait at most
STAGES = ("pt", "sft", "rm", "kto")


def get_preprocessed_dataset(
    original: Callable[..., Any],
    dataset: Any,
    data_args: Any,
    training_args: Any,
    stage: str,
    template: Any,
    tokenizer: Any,
    processor: Any = None,
    is_eval: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Count the rows of the training set once the host has tokenized them, on the first rank."""
    made = original(
        dataset, data_args, training_args, stage, template, tokenizer, processor, is_eval, *args, **kwargs
    )
    now = run.current()
    mine = now.arguments is not None and now.arguments.data is data_args
    wanted = mine and training_args.do_train and training_args.process_index == 0 and not is_eval
    if wanted and dataset is not None and stage in STAGES and not data_args.streaming:
        encoder = Encoder(data_args, template, tokenizer, processor)
        now.attempt("the lengths of the rows", _measure, now, dataset, encoder, stage)
    return made


def _measure(now: run.Run, dataset: Any, encoder: Encoder, stage: str) -> None:
    totals = count(dataset, encoder, stage, SECONDS)
    trained_lengths.record(now, totals, len(dataset), encoder.data_args.cutoff_len)


def count(dataset: Any, encoder: Encoder, stage: str, seconds: float) -> Totals:
    """Count converted rows from all over a data set until the time is over."""
    see, totals = RowCounter(encoder, stage), Totals()
    deadline = time.monotonic() + seconds
    for number in spread(len(dataset)):
        see(totals, f"row {number}", number, dataset[number])
        if time.monotonic() > deadline:
            break
    return totals


def spread(rows: int) -> Iterator[int]:
    """Yield every number below ``rows`` once, in an order whose every beginning is spread over them all."""
    step = max(round(rows * (math.sqrt(5) - 1) / 2), 1)
    while math.gcd(step, rows) > 1:
        step += 1
    return (place * step % rows for place in range(rows))


PATCHES = [
    Patch(
        id="data.lengths",
        targets=(Target("llamafactory.data.loader", "_get_preprocessed_dataset"),),
        around=get_preprocessed_dataset,
        parameters=(
            "dataset",
            "data_args",
            "training_args",
            "stage",
            "template",
            "tokenizer",
            "processor",
            "is_eval",
            ANYTHING,
        ),
        why="Nothing says how many tokens `cutoff_len` takes away from the rows of a training.",
        remove_when="the host reports it",
        tested={"5f36d63c32e6": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
    ),
]
