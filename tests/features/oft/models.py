"""Tiny models with OFT adapters: the plugin's rotations and PEFT's exact ones beside each other."""

from pathlib import Path
from typing import Any

import torch
from peft import OFTConfig, PeftModel, get_peft_model

from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.oft.substitution import SharedRotations, substitute
from tests.training import IDS, load

TEXT = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
TARGETS = {"qwen2": TEXT, "qwen25vl": [*TEXT, "qkv"], "qwen3_5": [*TEXT, "in_proj_qkv", "qkv", "linear_fc1"]}


def config(name: str = "qwen2", **changes: Any) -> OFTConfig:
    """An exact adapter with weights that rotate: entries of std 0.1."""
    settings = {
        "r": 0,
        "oft_block_size": 16,
        "task_type": "CAUSAL_LM",
        "use_cayley_neumann": False,
        "init_weights": False,
    }
    return OFTConfig(target_modules=TARGETS[name], **{**settings, **changes})


def with_peft(folder: Path, checkpointed: bool = False, **changes: Any) -> PeftModel:
    """A model in training mode with an adapter as PEFT computes it; the same weights at every call."""
    model = load(folder)
    if checkpointed:
        checkpointing.enable(model)
    torch.manual_seed(0)
    return get_peft_model(model, config(folder.name, **changes)).train()


def with_ours(folder: Path, **changes: Any) -> tuple[PeftModel, SharedRotations]:
    """The same with shared rotations, and these."""
    model = with_peft(folder, **changes)
    return model, substitute(model)


def loss(model: PeftModel, **inputs: Any) -> torch.Tensor:
    found: torch.Tensor = model(**(inputs or {"input_ids": IDS, "labels": IDS})).loss
    return found


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def gradients(model: PeftModel) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def difference(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> float:
    """Return the largest relative L2 difference; without a gradient on one side, there must be none here."""
    assert one.keys() == other.keys()
    worst = 0.0
    for name, gradient in one.items():
        expected = other[name]
        assert (gradient is None) == (expected is None), name
        if gradient is not None and expected is not None:
            assert gradient.isfinite().all() and expected.isfinite().all(), name
            worst = max(worst, float((gradient - expected).norm() / expected.norm()))
    assert any(gradient is not None for gradient in one.values())
    return worst
