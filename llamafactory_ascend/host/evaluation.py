"""The last evaluation: the host asks for it once more after a training has just done it."""

import weakref
from collections.abc import Callable
from typing import Any

from llamafactory_ascend import run
from llamafactory_ascend.patching import Patch, Target
from llamafactory_ascend.report.gathering import all_gather

# Trainer -> the evaluation it did last: (what it was of, the metrics it returned)
_last: "weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, float]]]" = weakref.WeakKeyDictionary()


def evaluate(
    original: Callable[..., dict[str, float]],
    trainer: Any,
    eval_dataset: Any = None,
    ignore_keys: list[str] | None = None,
    metric_key_prefix: str = "eval",
) -> dict[str, float]:
    """Answer the evaluation after a training from the one at its last step, where nothing has changed.

    Generation takes other arguments after the training, and the best model is another one: both evaluate.
    """
    now = run.current()
    if now.arguments is None or eval_dataset is not None or trainer.args.predict_with_generate:
        return original(trainer, eval_dataset, ignore_keys, metric_key_prefix)
    of = subject(trainer, metric_key_prefix)
    same, metrics = _last.get(trainer, (None, {}))
    asked_again = bool(metrics) and not trainer.is_in_train and not trainer.args.load_best_model_at_end
    if asked_again and all(all_gather(same == of)):
        step = trainer.state.global_step
        now.decide("last evaluation", "not repeated", f"step {step} was evaluated with the same weights")
        return dict(metrics)
    found = original(trainer, eval_dataset, ignore_keys, metric_key_prefix)
    _last[trainer] = (of, dict(found))
    return found


def subject(trainer: Any, prefix: str) -> Any:
    """Return what an evaluation is of: the step, and each weight with how often it was written."""
    weights = trainer.model.parameters()
    written = [(id(weight), None if weight.is_inference() else weight._version) for weight in weights]
    return prefix, trainer.state.global_step, written


PATCHES = [
    Patch(
        id="trainer.evaluate",
        targets=(Target("transformers.trainer", "Trainer.evaluate"),),
        around=evaluate,
        parameters=("self", "eval_dataset", "ignore_keys", "metric_key_prefix"),
        why="With `eval_strategy` and `do_eval` the same weights are evaluated twice at the end.",
        remove_when="the host leaves the second evaluation out",
        tested={"d714e7e22446": "transformers 5.6.0 and 5.8.0"},
    ),
]
