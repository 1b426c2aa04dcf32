"""A full-size step before the first: what will not fit is found in a minute and not after a night.

The host pads a batch to its own longest row, so the memory of a run is only known once its longest rows have
met in a batch. `ascend.stress: true` makes such a batch of the data set's own rows, puts one optimizer step
and one evaluation step of it through the Trainer, and puts everything back: see ``features.stress.snapshot``.
"""

from typing import TYPE_CHECKING, Any

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.run import Arguments, Run

# The host's argument -> why a step with it cannot be taken back, or would be no step of the training.
OTHERS = {
    "training.torch_compile": "what is compiled for the full size would be used by the steps that follow",
    "training.auto_find_batch_size": "it answers lack of memory itself, with smaller batches",
    "data.streaming": "rows that are drawn from a stream are gone",
    "finetuning.use_badam": "BAdam trains one block after the other, each with another need of memory",
    "finetuning.galore_layerwise": "it updates weights within backward, by optimizers of its own",
    "finetuning.apollo_layerwise": "it updates weights within backward, by optimizers of its own",
    "finetuning.use_mca": "Megatron brings a trainer of its own",
    "finetuning.use_hyper_parallel": "HyperParallel brings a trainer of its own",
    "model.use_kt": "KTransformers builds another model",
}
IN_BACKWARD = ("lomo", "adalomo")  # optimizers


def against(arguments: "Arguments") -> str:
    """Return what speaks against a full-size step in this run, "" if nothing does."""
    if arguments.finetuning.stage == "ppo":
        return "`stage: ppo` generates its rows as it trains, in a loop of its own"
    if arguments.training.deepspeed_plugin:
        return "DeepSpeed keeps weights and optimizer state of its own, which cannot be put back"
    for path, reason in OTHERS.items():
        owner, _, name = path.partition(".")
        if getattr(getattr(arguments, owner), name, None):
            return f"`{name}`: {reason}"
    optimizer = str(getattr(arguments.training.optim, "value", arguments.training.optim))
    return f"`optim: {optimizer}` updates weights within backward" if optimizer in IN_BACKWARD else ""


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    """Refuse a request that cannot be met, before anything is loaded.

    Raises:
        AscendError: with the reason.
    """
    run.facts.pop("stress", None)  # of an earlier training in this process
    if not run.settings.stress or not arguments.training.do_train:
        return
    if reason := against(arguments):
        raise AscendError(f"`ascend.stress: true`: {reason}", "leave `ascend.stress` out")


@hookimpl(trylast=True)  # so that every other callback has made the model ready by then
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    assert run.arguments is not None
    if not run.settings.stress or not run.arguments.training.do_train:
        return []
    from llamafactory_ascend.features.stress.callback import Stress

    return [Stress(run, trainer, run.arguments.data.cutoff_len)]


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `stress`: size, time and peak memory of the full-size step of this rank; null without one."""
    return {"stress": run.facts.get("stress")}
