"""Estimates what a recipe holds on a card: ``python -P -m <this> FILE OPTIONS RECIPE``, the options in JSON.

The recipe is parsed, and the model is built and given its adapters, by the host's own code, with the plugin's
patches in place, on the meta device: no weights are read. What was found is appended to FILE, one JSON line
per stage, as ``host/probe.py`` does.
"""

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

from llamafactory_ascend import device, plugins, run
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.host import preflight
from llamafactory_ascend.host.probe import Log

CARD = device.Device("npu", "Ascend910B3", 1, False, "assumed: there is none here", memory=64 << 30)
ANYWHERE = ["use_cpu=true", "ascend.device=any"]  # so that a machine without an NPU reads the recipe


class Measurable:
    """Brings back ends that can be measured without the device that they are for."""

    @hookimpl
    def ascend_kernels(self) -> Any:
        from llamafactory_ascend.memory import operators

        return operators.measurable()


def read(words: list[str]) -> run.Arguments:
    """Parse a recipe, and decide from here on as on an NPU.

    Raises:
        AscendError: the recipe is refused, or trains what cannot be estimated.
    """
    found = device.decide()
    preflight.parse(words if found.type == "npu" else [*words, *ANYWHERE])
    device.assume(found if found.type == "npu" else CARD)
    plugins.manager().register(Measurable())
    now = run.current()
    assert now.arguments is not None
    refuse_unknown(now.arguments)
    plugins.manager().hook.ascend_arguments(run=now, arguments=now.arguments)
    return now.arguments


def build(arguments: run.Arguments, tokenizer: Any) -> Any:
    """Return the model as it is trained, on the meta device."""
    import torch
    from llamafactory.model import loader

    model_args = arguments.model
    model_args.train_from_scratch = True  # from its config alone
    model_args.adapter_name_or_path = None
    now, hook = run.current(), plugins.manager().hook
    hook.ascend_before_model(run=now, arguments=arguments)
    load = inspect.unwrap(loader.load_model)  # the hooks around it may compute with real tensors
    with torch.device("meta"):
        model = load(tokenizer, model_args, arguments.finetuning, is_trainable=True)
    hook.ascend_after_model(run=now, model=model)
    training = arguments.training
    if training.gradient_checkpointing:  # as the Trainer does when the training begins
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=training.gradient_checkpointing_kwargs
        )
    return model


def plan(arguments: run.Arguments, model: Any, rows: Any, cards: int) -> Any:
    """Return how the model is trained, for `memory.step.measure`."""
    import torch
    from transformers import Trainer

    from llamafactory_ascend.features import kernels
    from llamafactory_ascend.memory.step import Plan

    training, tokens = arguments.training, arguments.data.cutoff_len
    kind, options = Trainer.get_optimizer_cls_and_kwargs(training, model)
    mixed = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
    chosen = kernels.plan()
    evaluates = training.eval_strategy != "no" or training.do_eval
    policy = sharding(training, mixed, model) if cards > 1 else None
    return Plan(
        batch=rows.batch(model, training.per_device_train_batch_size, tokens),
        optimizer=lambda parameters: kind(parameters, **options),
        eval_batch=rows.batch(model, training.per_device_eval_batch_size, tokens) if evaluates else None,
        accumulation=training.gradient_accumulation_steps,
        autocast=mixed if policy is None else None,
        max_grad_norm=training.max_grad_norm,
        cards=cards,
        policy=policy,
        switches=list(chosen.done.switches.values()) if chosen else [],
    )


def sharding(training: Any, mixed: Any, model: Any) -> Any:
    """Return how FSDP2 shards in this training, None without FSDP.

    Raises:
        AscendError: what shards is no FSDP2.
    """
    import torch

    from llamafactory_ascend.features.sharding import uses_fsdp
    from llamafactory_ascend.memory.fsdp2 import Policy

    if not uses_fsdp(training):
        return None
    config = training.fsdp_config
    if int(config.get("version", 1)) != 2:
        raise AscendError("FSDP1 cannot be estimated", "write `fsdp_config: {version: 2, ...}`")
    return Policy(
        classes=frozenset(config.get("transformer_layer_cls_to_wrap") or ()),
        stored=torch.float32 if mixed else None,
        frozen=next((x.dtype for x in model.parameters() if not x.requires_grad), None),
        computed=mixed,
        reshard=bool(config.get("reshard_after_forward", True)),
        whole=0 if stays_off_the_card(config) else sum(x.nbytes for x in model.parameters()),
    )


def stays_off_the_card(config: dict[str, Any]) -> bool:
    """True where rank 0 alone reads the weights, into host memory; the plugin sees to it in sft and pt."""
    value = config.get("cpu_ram_efficient_loading", os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", ""))
    return str(value).lower() == "true"


# What the recipe may ask for that changes memory in a way nobody has put down here.
UNKNOWN = {
    "model.quantization_bit": "quantized weights",
    "model.use_unsloth": "Unsloth",
    "model.use_kt": "KTransformers",
    "model.enable_liger_kernel": "Liger",
    "model.use_v1_kernels": "the host's own kernels",
    "model.mixture_of_depths": "a mixture of depths",
    "finetuning.use_galore": "GaLore",
    "finetuning.use_apollo": "APOLLO",
    "finetuning.use_badam": "BAdam",
    "finetuning.use_adam_mini": "Adam-mini",
    "finetuning.use_muon": "Muon",
    "finetuning.use_dft_loss": "DFT's loss",
    "finetuning.use_eaft_loss": "EAFT's loss",
    "finetuning.use_asft_loss": "ASFT's loss, which has a second model",
    "finetuning.use_mca": "Megatron",
    "training.deepspeed": "DeepSpeed",
    "training.torch_compile": "a compiled model",
}


def refuse_unknown(arguments: run.Arguments) -> None:
    """Stop where an estimate would be wrong.

    Raises:
        AscendError: the recipe asks for what is not estimated.
    """
    stage = arguments.finetuning.stage
    if stage not in ("sft", "pt") or not arguments.training.do_train:
        what = f"stage {stage}" if arguments.training.do_train else "a recipe without `do_train: true`"
        raise AscendError(f"{what} cannot be estimated", "training in the stages sft and pt can")
    for path, what in UNKNOWN.items():
        owner, _, name = path.partition(".")
        if getattr(getattr(arguments, owner), name, None):
            raise AscendError(f"`{name}`: {what} cannot be estimated", f"leave `{name}` out to see the rest")


def has_pictures(arguments: run.Arguments) -> bool:
    """True where a data set of the recipe has a column of pictures."""
    from llamafactory.data import parser

    data = arguments.data
    return any(attribute.images for attribute in parser.get_dataset_list(data.dataset, data.dataset_dir))


def estimate(options: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Return what one card holds in each phase, and what would fit on it; plain data.

    Args:
        options: `cards`: ranks, None: as the environment says; `images`: in each row, None: one where the
            data sets have pictures; `memory`: bytes of a card, None: the device's; `fits`: look what would
            fit as well.
        words: a recipe and what overrides it.

    Raises:
        AscendError: the recipe cannot be estimated, or its model is not there.
    """
    from llamafactory_ascend.host.full_rows import FullRows
    from llamafactory_ascend.memory import fitting, step

    arguments = read(words)
    card, training, tokens = device.decide(), arguments.training, arguments.data.cutoff_len
    cards = options["cards"] or ranks(card)
    images = int(has_pictures(arguments)) if options["images"] is None else options["images"]
    try:
        rows = FullRows(arguments, images)
    except OSError as error:
        name = arguments.model.model_name_or_path
        raise AscendError(
            f"no config and tokenizer of `{name}` can be read: {error.__cause__ or error}",
            "give a folder that holds them: model_name_or_path=DIR",
        ) from error
    model = build(arguments, rows.tokenizer)
    planned = plan(arguments, model, rows, cards)
    memory = int(options["memory"] or card.memory or 0)
    count = training.per_device_train_batch_size
    fit = None
    phases = step.measure(model, planned)
    if options["fits"]:
        fit = fitting.what_fits(model, planned, memory, lambda n, t: rows.batch(model, n, t), tokens, count)
    trained = [x for x in model.parameters() if x.requires_grad]
    phase, peak = fitting.peak(phases)
    return {
        "card": {"name": card.name, "memory": memory, "reason": card.reason},
        "cards": cards,
        "sharding": "FSDP2" if planned.policy else "DDP" if cards > 1 else "none",
        "batch": {"rows": count, "cutoff_len": tokens, "images": images, "steps": planned.accumulation},
        "model": {
            "parameters": sum(x.numel() for x in model.parameters()),
            "trainable": sum(x.numel() for x in trained),
        },
        "phases": {
            name: {kind: size for kind, size in held.items() if size} for name, held in phases.items()
        },
        "peak": {"phase": phase, "bytes": peak},
        "fits": peak <= memory,
        "would_fit": fit
        and {
            "cutoff_len": fit.tokens,
            "per_device_train_batch_size": fit.rows,
            "cards": fit.cards,
        },
        "decisions": {
            name: decision.choice
            for name, decision in run.current().decisions.items()
            if name.partition(".")[0] in ("checkpointing", "kernels", "loss")
        },
    }


def ranks(card: device.Device) -> int:
    """Return how many ranks a training here would have."""
    nodes = os.environ.get("NNODES", "")
    here = os.environ.get("NPROC_PER_NODE", "")
    each = int(here) if here.isdecimal() else card.count
    return each * (int(nodes) if nodes.isdecimal() else 1)


if __name__ == "__main__":
    log = Log(Path(sys.argv[1]))
    log.stage("estimate", lambda: estimate(json.loads(sys.argv[2]), sys.argv[3:]))
