"""What real runs reported of their memory, and the recipes that come nearest to them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB, GB = 1 << 30, 10**9
MODELS = {"27b": "Qwen/Qwen3.8-27B", "7b": "Qwen/Qwen2.5-7B"}
STOCK = ["ascend.kernels=off", "ascend.loss=off"]


@dataclass(frozen=True)
class Figure:
    """Bytes that were reported, from `low` to `high`, and how to estimate them.

    Attributes:
        unit: of the report, in bytes.
        estimate: (estimator, working folder) -> bytes.
    """

    low: float
    high: float
    unit: int
    estimate: Callable[[Any, Path], int]


def write_models(work: Path) -> None:
    """Write config, tokenizer and processor of the models, as far as an estimate needs them; no weights."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    from tests import geometry
    from tests.assets.models import VISION_TOKENS
    from tests.assets.tokenizer import make_tokenizer

    for folder, name in MODELS.items():
        config = geometry.CONFIGS[name]()
        config.dtype = "bfloat16"
        tokenizer = make_tokenizer()
        if hasattr(config, "vision_config"):
            for key, value in VISION_TOKENS.items():
                setattr(config, key, value)
            patch = config.vision_config.patch_size
            processor = transformers.Qwen3VLProcessor(
                image_processor=Qwen2VLImageProcessor(patch_size=patch, min_pixels=4 * patch**2),
                video_processor=Qwen3VLVideoProcessor(patch_size=patch),
                tokenizer=tokenizer,
            )
            processor.save_pretrained(work / folder)
        config.save_pretrained(work / folder)
        tokenizer.save_pretrained(work / folder)


def _recipe(name: str, model: str, cards: int, *words: str, phase: str = "") -> Callable[[Any, Path], int]:
    """Return the peak of a shipped recipe in training, or of one of its phases."""

    def estimate(estimator: Any, work: Path) -> int:
        there = [f"model_name_or_path={work / model}", f"output_dir={work / 'nowhere'}"]
        evaluation = ["eval_strategy='no'", "load_best_model_at_end=false", "eval_dataset=null"]
        phases = estimator([f"ascend:{name}", *there, *evaluation, *STOCK, *words], cards, False)["phases"]
        wanted = [phase] if phase else ["forward", "recompute", "backward", "optimizer"]
        return max(sum(phases[key].values()) for key in wanted if key in phases)

    return estimate


def _gated_delta_rule(estimator: Any, work: Path) -> int:
    """Return what the rule holds at [1, 4096, 48, 128] in bfloat16, its inputs and gradients included."""
    import torch

    from llamafactory_ascend.kernels.gated_delta_rule import chunk_gated_delta_rule
    from llamafactory_ascend.memory import fakes
    from llamafactory_ascend.memory.ledger import Ledger

    with fakes.new_mode(), Ledger() as book:
        states = [torch.empty(1, 4096, 48, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        gates = [torch.empty(1, 4096, 48, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
        inputs = [*states, *(gate.requires_grad_() for gate in gates)]
        output, _ = chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
        output.backward(torch.empty_like(output))
        (found,) = book.peaks.found.values()
    return sum(found.values())


SHORT = ("cutoff_len=512", "per_device_train_batch_size=1", "gradient_accumulation_steps=1")
BARE = ("gradient_checkpointing=false", "disable_gradient_checkpointing=true", "ascend.checkpointing=off")
PUBLISHED = {
    "27B hybrid, FSDP2 on 8 cards, 4,096 tokens, GiB": Figure(
        32.3 * GIB, 32.6 * GIB, GIB, _recipe("qwen3_8_27b_lora_sft_fsdp2", "27b", 8)
    ),
    "7B, 512 tokens, no checkpointing, GB": Figure(
        21.2 * GB, 21.2 * GB, GB, _recipe("qwen2_5_7b_lora_sft", "7b", 1, *SHORT, *BARE)
    ),
    "7B, 512 tokens, GB": Figure(16.4 * GB, 16.4 * GB, GB, _recipe("qwen2_5_7b_lora_sft", "7b", 1, *SHORT)),
    "7B, between two steps, GB": Figure(
        15.0 * GB, 15.0 * GB, GB, _recipe("qwen2_5_7b_lora_sft", "7b", 1, *SHORT, phase="saving")
    ),
    "gated delta rule alone, GiB": Figure(1.39 * GIB, 1.39 * GIB, GIB, _gated_delta_rule),
}
