"""The moment after the host has saved tokenized data: what it was made with is written beside it."""

from collections.abc import Callable
from typing import Any

from llamafactory_ascend import run
from llamafactory_ascend.features import tokenized
from llamafactory_ascend.patching import ANYTHING, Patch, Target


def get_dataset(
    original: Callable[..., Any],
    template: Any,
    model_args: Any,
    data_args: Any,
    training_args: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Record the settings on the rank that saved; reused data is judged before, by the preflight."""
    reused = tokenized.holds_data(data_args.tokenized_path)
    made = original(template, model_args, data_args, training_args, *args, **kwargs)
    now = run.current()
    saved = training_args.should_save and not reused and tokenized.holds_data(data_args.tokenized_path)
    if saved and now.arguments is not None and now.arguments.data is data_args:
        now.attempt("the record of tokenized_path", tokenized.record, now)
    return made


PATCHES = [
    Patch(
        id="data.tokenized",
        targets=(Target("llamafactory.data.loader", "get_dataset"),),
        around=get_dataset,
        parameters=("template", "model_args", "data_args", "training_args", ANYTHING),
        why="Data at `tokenized_path` is reused after template, cutoff_len or data have changed.",
        remove_when="the host records what tokenized data was made with, and compares it",
        tested={"80d56c1fa2e9": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
    ),
]
