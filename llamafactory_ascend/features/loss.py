"""The loss of a training without its logits: whether, for which models, and the proof that it was used."""

from typing import TYPE_CHECKING, Any

from llamafactory_ascend import device
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.kernels.families import family_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.features.chunked_loss import ChunkedLoss
    from llamafactory_ascend.run import Arguments, Run

# The host's argument -> why it needs what the chunked loss does not make, or replaces it itself.
OTHERS = {
    "finetuning.use_dft_loss": "it weighs the loss by the logits",
    "finetuning.use_eaft_loss": "it weighs the loss by the logits",
    "finetuning.use_asft_loss": "it compares the logits with those of a reference model",
    "finetuning.ld_alpha": "it weighs each word's likelihood by its place",
    "training.label_smoothing_factor": "the Trainer smooths labels on the logits",
    "model.enable_liger_kernel": "Liger brings its own",
    "model.use_unsloth": "Unsloth brings its own",
    "model.use_kt": "KTransformers builds another model",
    "finetuning.use_mca": "Megatron builds another model",
    "training.torch_compile": "a compiled model is traced past it",
}

# Stages whose loss is the model's own, and those that need of the logits the labels' likelihoods alone.
OWN_LOSS, PREFERENCES = ("sft", "pt"), ("dpo", "kto")

_losses: "list[ChunkedLoss]" = []  # of the training of this process; a second one replaces them


def current() -> "ChunkedLoss | None":
    """Return the chunked loss of the model that is trained in this process, None where there is none."""
    return _losses[0] if _losses else None


def all_of_them() -> "list[ChunkedLoss]":
    """Return the chunked losses of the model that is trained and of a reference model beside it."""
    return _losses


def against(run: "Run", arguments: "Arguments", model: "nn.Module") -> str:
    """Return what speaks against the chunked loss in this run, "" if nothing does."""
    from llamafactory_ascend.features.chunked_loss import unfit

    asked, stage = run.settings.loss == "chunked", arguments.finetuning.stage
    if stage not in (*OWN_LOSS, *PREFERENCES):
        return f"stage {stage} computes on logits"
    for path, reason in OTHERS.items():
        owner, _, name = path.partition(".")
        if getattr(getattr(arguments, owner), name, None):
            return f"`{name}`: {reason}"
    if arguments.training.deepspeed and arguments.training.hf_deepspeed_config.is_zero3():
        return "DeepSpeed ZeRO-3 gathers the head for its own forward only"
    kind = device.decide(arguments.training.device.type).type
    if not asked and kind != "npu":
        return f"`auto` leaves the loss as it is on a {kind.upper()}"
    if not asked and run.settings.kernels == "off":
        return "`auto` leaves the loss as it is with `kernels: off`"
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if family_of(model_type) is None:
        return f"`{model_type}` is of no family that is known"
    return unfit(model)


@hookimpl
def ascend_after_model(run: "Run", model: "nn.Module") -> None:
    """Put the chunked loss into the model.

    Raises:
        AscendError: the recipe asks for it and something speaks against it.
    """
    from llamafactory_ascend.features.chunked_loss import ChunkedLoss

    _losses.clear()
    assert run.arguments is not None
    if run.settings.loss == "off":
        run.decide("loss", "of all logits at once", "`ascend.loss: off`")
        return
    inner: Any = model
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    reason = against(run, run.arguments, base)
    if reason and run.settings.loss == "chunked":
        raise AscendError(f"`ascend.loss: chunked`: {reason}", "leave `ascend.loss` out")
    if reason:
        run.decide("loss", "of all logits at once", reason)
        return
    _losses.append(ChunkedLoss(base))
    run.decide("loss", "in chunks of the supervised positions", f"`ascend.loss: {run.settings.loss}`")


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    loss = current()
    if loss is None:
        return []
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        _join(run, reference)
    from llamafactory_ascend.features.loss_proof import LossProof

    return [LossProof(run, loss)]


def _join(run: "Run", reference: "nn.Module") -> None:
    """Let a reference model return likelihoods too; its Trainer has not wrapped it yet.

    Raises:
        AscendError: the recipe asks for it and something speaks against it.
    """
    from llamafactory_ascend.features.chunked_loss import ChunkedLoss, unfit

    reason = unfit(reference)
    if reason and run.settings.loss == "chunked":
        raise AscendError(f"`ascend.loss: chunked`: reference model: {reason}", "leave `ascend.loss` out")
    if reason:
        run.decide("loss.reference", "of all logits at once", reason)
        return
    _losses.append(ChunkedLoss(reference))
    run.decide("loss.reference", "in chunks of the supervised positions", "as the model that is trained")


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `loss`: how often the chunked loss was computed in the first step of this rank."""
    return {"loss": run.facts.get("loss")}
