"""Where logits are made for the loss alone.

An evaluation without metrics drops them. The preference trainers (DPO, ORPO, SimPO, KTO) take from them the
log-probabilities of the labels and, for the log, a mean; both can be had without them.
"""

from collections.abc import Callable
from typing import Any

from llamafactory_ascend.features import loss
from llamafactory_ascend.patching import Patch, Target


def prediction_step(
    original: Callable[..., Any],
    trainer: Any,
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    ignore_keys: list[str] | None = None,
) -> Any:
    """Compute the loss of an evaluation as that of the training, where nothing else is asked for."""
    from llamafactory_ascend.features.chunked_loss import only_the_loss

    with only_the_loss(loss.current(), prediction_loss_only):
        return original(trainer, model, inputs, prediction_loss_only, ignore_keys)


def get_batch_logps(
    original: Callable[..., Any],
    logits: Any,
    labels: Any,
    label_pad_token_id: int = -100,
    ld_alpha: float | None = None,
) -> tuple[Any, Any]:
    """Add up what a model has returned in place of its logits: [B, T], 0 where there is no label.

    Returns:
        Log-probabilities and numbers of the labels of each row, as the original.
    """
    if logits.dim() == labels.dim():
        return logits.sum(-1), (labels[:, 1:] != label_pad_token_id).sum(-1)
    found: tuple[Any, Any] = original(logits, labels, label_pad_token_id, ld_alpha)
    return found


def dpo_forward(
    original: Callable[..., Any], trainer: Any, model: Any, batch: Any, is_ref_model: bool = False
) -> dict[str, Any]:
    """Ask the model for the labels' likelihoods, and give the log the means of the logits."""
    from llamafactory_ascend.features.chunked_loss import likelihoods_of

    with likelihoods_of(batch["labels"], loss.all_of_them()) as asked:
        output: dict[str, Any] = original(trainer, model, batch, is_ref_model)
    if asked.logit_sums is not None:
        means = asked.logit_sums / asked.logit_count
        output["chosen_logits"], output["rejected_logits"] = means.chunk(2)
    return output


def kto_forward(
    original: Callable[..., Any], trainer: Any, model: Any, batch: Any, prefix: str = ""
) -> tuple[Any, Any, Any]:
    """The same for KTO, whose log adds logits up."""
    from llamafactory_ascend.features.chunked_loss import likelihoods_of

    with likelihoods_of(batch[f"{prefix}labels"], loss.all_of_them()) as asked:
        logits, likelihoods, means = original(trainer, model, batch, prefix)
    return logits if asked.logit_sums is None else asked.logit_sums, likelihoods, means


PATCHES = [
    Patch(
        id="trainer.prediction_step",
        targets=(Target("transformers.trainer", "Trainer.prediction_step"),),
        around=prediction_step,
        parameters=("self", "model", "inputs", "prediction_loss_only", "ignore_keys"),
        why="An evaluation without metrics makes the logits of all positions and drops them.",
        remove_when="Transformers computes the loss of an evaluation without logits",
        tested={"ac09d872efa2": "transformers 5.6.0 and 5.8.0"},
        feature="loss",
    ),
    Patch(
        id="preferences.likelihoods",
        targets=(Target("llamafactory.train.trainer_utils", "get_batch_logps"),),
        around=get_batch_logps,
        parameters=("logits", "labels", "label_pad_token_id", "ld_alpha"),
        why="The likelihoods of labels are taken from the logits of all positions, in float32.",
        remove_when="the host computes them in chunks",
        tested={"8076e2df48c0": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
        feature="loss",
    ),
    Patch(
        id="preferences.dpo",
        targets=(Target("llamafactory.train.dpo.trainer", "CustomDPOTrainer.concatenated_forward"),),
        around=dpo_forward,
        parameters=("self", "model", "batch", "is_ref_model"),
        why="DPO, ORPO and SimPO make the logits of all positions, for the model and its reference.",
        remove_when="the host computes the likelihoods of labels in chunks",
        tested={"01052d609c8d": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
        feature="loss",
    ),
    Patch(
        id="preferences.kto",
        targets=(Target("llamafactory.train.kto.trainer", "CustomKTOTrainer.forward"),),
        around=kto_forward,
        parameters=("self", "model", "batch", "prefix"),
        why="KTO makes the logits of all positions four times a step.",
        remove_when="the host computes the likelihoods of labels in chunks",
        tested={"7d62c3b40469": "llamafactory 0.9.5 and llamafactory-kt 0.9.6.dev0"},
        feature="loss",
    ),
]
