"""What cannot be had beside the plugin's checkpointing, by the arguments of a run."""

import os
from typing import TYPE_CHECKING

from llamafactory_ascend.errors import AscendError

if TYPE_CHECKING:
    from llamafactory_ascend.run import Arguments

TRUE = {"y", "yes", "t", "true", "on", "1"}  # what accelerate takes for true in the environment


def double_checkpointing(arguments: "Arguments") -> str:
    """Return what also turns FSDP's own checkpointing on, as the user wrote it, or "".

    The Trainer takes ``fsdp_config`` (it has dropped the prefix ``fsdp_`` from its keys by now) before the
    environment that ``accelerate launch`` makes of its config.
    """
    training = arguments.training
    if not (training.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in TRUE):
        return ""
    config = training.fsdp_config or {}
    if "activation_checkpointing" in config:
        value = str(config["activation_checkpointing"]).lower()
        key = "activation_checkpointing (or fsdp_activation_checkpointing)"
        return f"fsdp_config: {key}: {value}" if config["activation_checkpointing"] else ""
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() in TRUE:
        value = os.environ["FSDP_ACTIVATION_CHECKPOINTING"]
        key = "fsdp_activation_checkpointing in the accelerate config"
        return f"FSDP_ACTIVATION_CHECKPOINTING={value} ({key})"
    return ""


def parameters_come_and_go() -> bool:
    """True under DeepSpeed ZeRO-3, which empties each parameter in place after use.

    torch keeps the frozen parameters that a recomputed layer needs by reference, so backward finds them empty
    (a CheckpointError in the first step of every LoRA run). Re-entrance does not keep them.
    """
    from transformers.integrations import is_deepspeed_zero3_enabled

    return bool(is_deepspeed_zero3_enabled())


def against(mode: str, arguments: "Arguments") -> str:
    """Return what speaks against `auto` or `offload` in this run, "" if nothing does."""
    model, training, finetuning = arguments.model, arguments.training, arguments.finetuning
    if model.use_unsloth_gc or model.use_unsloth:
        return "Unsloth brings its own checkpointing"
    if training.torch_compile:
        return "`torch_compile: true` fixes at the first step what is recomputed and where it is kept"
    if mode == "auto" and finetuning.stage == "ppo":
        return "`stage: ppo` has a loop of its own, without a step to measure"
    if mode == "auto" and finetuning.use_badam:
        return "BAdam trains one block after the other, each with another need of memory"
    if training.device.type == "cpu":
        memory = {"auto": "no device memory to fit into", "offload": "no device memory to relieve"}
        return f"this run is on a CPU, so there is {memory[mode]}"
    return ""


def refuse_double_checkpointing(arguments: "Arguments") -> None:
    """Stop a run that would recompute every activation twice, before its model is loaded.

    Raises:
        AscendError: FSDP's own activation checkpointing is on as well.
    """
    line = double_checkpointing(arguments)
    if line:
        raise AscendError(
            f"activations would be recomputed twice: `{line}` beside gradient checkpointing",
            "remove that line; or keep it and set `disable_gradient_checkpointing: true`",
            "https://github.com/hiyouga/LLaMA-Factory/issues/9064",
        )
