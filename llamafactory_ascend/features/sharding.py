"""FSDP from the recipe alone: what is saved whole, what is sharded, and whether the model really was.

The host reads neither ``state_dict_type`` nor ``offload_params`` of ``fsdp_config``; with FSDP2's default of
sharded state a run ends without any model file. Accelerate ignores FSDP without a word on a CPU.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.run import Arguments, Run

VARIABLE = "FSDP_STATE_DICT_TYPE"
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
TYPES = (FULL, "LOCAL_STATE_DICT", SHARDED)  # in the order of accelerate's numbers, from 1
ENABLED = "ACCELERATE_USE_FSDP"  # what Transformers reads while it loads a model


def is_adapter(arguments: "Arguments") -> bool:
    """True where the run trains an adapter that PEFT saves."""
    others = ("use_mca", "use_hyper_parallel", "use_megatron_bridge")
    other_trainer = any(getattr(arguments.finetuning, key, False) for key in others)
    return arguments.finetuning.finetuning_type in ("lora", "oft") and not other_trainer


def uses_fsdp(training: Any) -> bool:
    """True where the recipe asks for FSDP, or `accelerate launch` does."""
    return bool(training.fsdp) or os.environ.get(ENABLED, "").lower() == "true"


def chosen_type(config: dict[str, Any]) -> tuple[str, str]:
    """Return (state dict type, where the user wrote it); ("", "") where the user chose none.

    Raises:
        AscendError: no such type, or recipe and environment differ.
    """
    found = [
        (os.environ.get(VARIABLE), VARIABLE),
        (config.get("state_dict_type"), "fsdp_config.state_dict_type"),
    ]
    chosen = [(read_type(str(value), where), where) for value, where in found if value]
    if len({kind for kind, _ in chosen}) > 1:
        both = " and ".join(f"`{where}: {kind}`" for kind, where in chosen)
        raise AscendError(f"{both} contradict each other", "remove one of them")
    return chosen[0] if chosen else ("", "")


def read_type(text: str, where: str) -> str:
    """Return accelerate's name of a state dict type: a number from 1 or a name in any case.

    Raises:
        AscendError: there is no such type.
    """
    name = TYPES[int(text) - 1] if text.isdigit() and 1 <= int(text) <= len(TYPES) else text.upper()
    if name not in TYPES:
        raise AscendError(f"`{where}: {text}` is no state dict type", f"write one of {', '.join(TYPES)}")
    return name


def checkpoint_type(folder: Path) -> str:
    """Return the state dict type of an FSDP checkpoint, "" where the folder is none."""
    if (folder / "pytorch_model_fsdp.bin").is_file():
        return FULL
    return SHARDED if (folder / "pytorch_model_fsdp_0").is_dir() else ""


def decide_state_type(run: "Run", arguments: "Arguments") -> str:
    """Decide how FSDP saves its training state, and return the type.

    Raises:
        AscendError: the checkpoint to resume from has another type than the user wants.
    """
    training = arguments.training
    kind, where = chosen_type(training.fsdp_config)
    resume = training.resume_from_checkpoint
    if resume is True:
        from transformers.trainer_utils import get_last_checkpoint

        resume = get_last_checkpoint(training.output_dir)
    saved = checkpoint_type(Path(resume)) if resume else ""
    if saved and kind and saved != kind:
        raise AscendError(
            f"{resume} was saved with {saved}, but `{where}` says {kind}", f"resume with {VARIABLE}={saved}"
        )
    if kind:
        run.decide("fsdp state", kind, f"`{where}`")
    elif saved:
        run.decide("fsdp state", saved, f"the type of {resume}")
    else:
        version = (training.fsdp_plugin_args or {}).get("fsdp_version") or os.environ.get("FSDP_VERSION", "1")
        kind = SHARDED if int(version) == 2 and not training.save_only_model else FULL
        because = "`save_only_model: true`" if training.save_only_model else "accelerate's default"
        run.decide("fsdp state", kind, f"{because}; {VARIABLE} chooses another")
    return kind or saved


def decide_products(run: "Run", arguments: "Arguments", kind: str) -> bool:
    """Decide whether the model is written whole, in output_dir and in every checkpoint."""
    if is_adapter(arguments):
        run.decide(
            "fsdp model files",
            "the whole adapter",
            "only its own tensors are gathered, whatever the state type",
        )
        return True
    if kind == SHARDED and chosen_type(arguments.training.fsdp_config)[0] == SHARDED:
        run.decide("fsdp model files", "shards only", "the state type was asked for")
        run.find(
            "warning",
            "sharding",
            f"{SHARDED} was asked for: output_dir will hold no model to load. Save at the last step, then: "
            "accelerate merge-weights checkpoint-N/pytorch_model_fsdp_0 OUTPUT; or leave the type unset",
        )
        return False
    run.decide(
        "fsdp model files", "the whole model", "gathered to rank 0, tensor by tensor, whatever the state type"
    )
    return True


def decide_loading(run: "Run", arguments: "Arguments") -> None:
    """Let rank 0 of each machine alone read the weights, on its CPU, as `accelerate launch` does.

    `cpu_ram_efficient_loading` does nothing in a recipe alone: Transformers looks for a variable that
    accelerate sets when the Trainer is made, and until then every card holds the whole model.
    """
    plugin, finetuning = arguments.training.fsdp_plugin_args or {}, arguments.finetuning
    if not plugin.get("cpu_ram_efficient_loading"):
        return
    if finetuning.stage not in ("sft", "pt") or finetuning.use_asft_loss:
        reason = "reference models and value heads are not handed out by rank 0"
        run.decide("fsdp loading", "the whole model on every card first", reason)
        return
    os.environ[ENABLED] = "true"
    run.decide("fsdp loading", "by rank 0 of each machine, on its CPU", "`cpu_ram_efficient_loading: true`")


def ignored_reason(arguments: "Arguments", device_type: str) -> str:
    """Return why accelerate will ignore FSDP without a word, "" where it will not."""
    if arguments.training.use_cpu:
        return "`use_cpu: true`: accelerate shards on accelerators only. Remove `use_cpu` or `fsdp`"
    if device_type == "cpu":
        return "there is no accelerator here, and accelerate shards on nothing else. Remove `fsdp`"
    return ""


def unmatched_classes(model: nn.Module, names: list[str]) -> list[str]:
    """Return the names that no module's class has."""
    classes = {type(module).__name__ for module in model.modules()}
    return [name for name in names if name not in classes]


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    training = arguments.training
    if not uses_fsdp(training) or not training.do_train or ignored_reason(arguments, training.device.type):
        return
    kind = decide_state_type(run, arguments)
    if training.fsdp_plugin_args is not None:
        training.fsdp_plugin_args["state_dict_type"] = kind
    decide_loading(run, arguments)
    run.facts["sharding"] = {"whole_model": decide_products(run, arguments, kind)}


@hookimpl
def ascend_preflight(run: "Run", arguments: "Arguments") -> list[Finding]:
    training = arguments.training
    if not uses_fsdp(training) or not training.do_train:
        return []
    found = []
    if reason := ignored_reason(arguments, training.device.type):
        level = "error" if run.settings.strict else "warning"
        found.append(Finding(level, "sharding", f"`fsdp` has no effect: {reason}"))  # type: ignore[arg-type]
    config = training.fsdp_config
    if training.fsdp and config.get("transformer_layer_cls_to_wrap") and "auto_wrap" not in training.fsdp:
        message = "`transformer_layer_cls_to_wrap` has no effect without `auto_wrap` in `fsdp`"
        found.append(Finding("warning", "sharding", message))
    return found


@hookimpl
def ascend_after_model(run: "Run", model: nn.Module) -> None:
    assert run.arguments is not None
    training = run.arguments.training
    ignored = ignored_reason(run.arguments, training.device.type)
    if not training.fsdp or "auto_wrap" not in training.fsdp or ignored:
        return
    from llamafactory_ascend.features.layers import checkpointable

    missing = unmatched_classes(model, training.fsdp_config.get("transformer_layer_cls_to_wrap") or [])
    if not missing:
        return
    layers = sorted({type(layer).__name__ for _, layer in checkpointable(model)})
    message = f"transformer_layer_cls_to_wrap: no module of this model is a {' or a '.join(missing)}"
    hint = f"its layers are {', '.join(layers)}"
    if training.fsdp_plugin_args["fsdp_version"] == 2:
        raise AscendError(message, hint)  # accelerate would, later and without naming a layer
    run.miss("sharding", message, hint)


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    assert run.arguments is not None
    training = run.arguments.training
    if not uses_fsdp(training) or ignored_reason(run.arguments, training.device.type):
        return []
    from llamafactory_ascend.features.sharding_proof import ShardingProof

    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return [ShardingProof(run, plugin, training.fsdp_config.get("transformer_layer_cls_to_wrap") or [])]


@hookimpl
def ascend_saved(run: "Run", trainer: "Trainer") -> None:
    """Refuse, on every rank, to end well without the whole model that was decided on.

    Adapters have a check of their own.
    """
    assert run.arguments is not None
    sharding = run.facts.get("sharding") or {}
    folder = Path(run.arguments.training.output_dir)
    files = [folder / "model.safetensors", folder / "model.safetensors.index.json"]
    wanted = sharding.get("whole_model") and sharding.get("modules") and not is_adapter(run.arguments)
    if not wanted:
        return
    from llamafactory_ascend.report.gathering import all_gather

    missing = trainer.args.should_save and not any(file.is_file() for file in files)
    if any(all_gather(missing)):
        raise AscendError(
            f"{folder} holds no whole model (neither {files[0].name} nor {files[1].name})",
            "see the log above",
        )


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `sharding`: version, modules on this rank, state type, offload; null without FSDP."""
    return {"sharding": run.facts.get("sharding")}
