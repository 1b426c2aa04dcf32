"""Training the tiny models in this process, on a CPU: what the host does, without the host."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.run import Run

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
IDS = torch.arange(12, 36).reshape(2, 12)


def load(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    multimodal = hasattr(config, "vision_config")
    kind = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder)


def adapted(folder: Path, targets: list[str] = ATTENTION, enable: bool = True) -> PeftModel:
    """A model as the host builds it: checkpointing, then PEFT, then the plugin's hook."""
    model = load(folder)
    if enable:
        checkpointing.enable(model)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).train()
    if enable:
        checkpointing.ascend_after_model(Run(), model)
    return model


def gradients(model: nn.Module, **inputs: Any) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    model(**(inputs or {"input_ids": IDS, "labels": IDS})).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


class Do(TrainerCallback):
    """Calls a function with the model at one of the Trainer's events."""

    def __init__(self, event: str, action: Callable[[nn.Module], Any]) -> None:
        setattr(self, event, lambda args, state, control, model, **_: action(model))


def trainer(model: nn.Module, folder: Path, *callbacks: TrainerCallback, **changes: Any) -> Trainer:
    """A Trainer for two steps on a CPU that enables checkpointing once more, as the host's does."""
    model.gradient_checkpointing_enable = lambda **kwargs: checkpointing.enable(
        model, **(kwargs["gradient_checkpointing_kwargs"] or {})
    )
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS.repeat(4, 1)]
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "gradient_checkpointing": True,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    arguments = TrainingArguments(**{**settings, **changes})
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks))
