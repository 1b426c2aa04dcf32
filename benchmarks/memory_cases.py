"""The trainings whose memory is estimated and measured, small ones, and their data."""

import json
from pathlib import Path
from typing import Any

SHARDED = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "reshard_after_forward": True, "cpu_ram_efficient_loading": True},
}
OFF = {"kernels": "off"}
NO_LOSS = {"kernels": "off", "loss": "off"}
NONE = {"disable_gradient_checkpointing": True}
LORA_ALL = {"lora_target": "all"}
OFT = {"finetuning_type": "oft", "oft_block_size": 16}
FULL = {"finetuning_type": "full"}
TWO = {"ranks": 2}
PACKED = {"packing": True, "neat_packing": True}
TEXT = {"model": "qwen3b", "template": "qwen3_nothink"}
HYBRID = {"model": "qwen3_5_big", "template": "qwen3_5_nothink"}
PICTURES = {"model": "vlm", "template": "qwen2_vl", "dataset": "pictures"}
WORDS = {"model": "vlm", "template": "qwen2_vl"}


def shards(*classes: str) -> dict[str, Any]:
    config = {**SHARDED["fsdp_config"], "transformer_layer_cls_to_wrap": list(classes)}  # type: ignore[dict-item]
    return {**SHARDED, "fsdp_config": config}


# name: what is changed in the recipe of tests/running.py; `ranks` are cards
CASES: dict[str, dict[str, Any]] = {
    "text": {**TEXT},
    "text, stock kernels": {**TEXT, "ascend": OFF},
    "text, stock loss": {**TEXT, "ascend": NO_LOSS},
    "text, no checkpointing": {**TEXT, **NONE, "ascend": OFF},
    "text, no checkpointing, fused kernels": {**TEXT, **NONE},
    "text, stock checkpointing": {**TEXT, **LORA_ALL, "ascend": {**OFF, "checkpointing": "off"}},
    "text, all targets, 512 tokens": {**TEXT, **LORA_ALL, "cutoff_len": 512, "ascend": OFF},
    "text, 512 tokens, batch 1": {**TEXT, "cutoff_len": 512, "per_device_train_batch_size": 1},
    "text, batch 4": {**TEXT, "per_device_train_batch_size": 4, "ascend": OFF},
    "text, 3 micro-batches": {**TEXT, **LORA_ALL, "gradient_accumulation_steps": 3, "ascend": OFF},
    "text, packed": {**TEXT, **PACKED, "cutoff_len": 255, "ascend": OFF},
    "text, packed, fused kernels": {**TEXT, **PACKED, "cutoff_len": 255},
    "text, OFT": {**TEXT, **OFT, "oft_target": "all", "ascend": OFF},
    "text, full": {**TEXT, **FULL, "ascend": OFF},
    "text, full, no checkpointing": {**TEXT, **FULL, **NONE, "ascend": NO_LOSS},
    "text, full, 2 micro-batches": {**TEXT, **FULL, "gradient_accumulation_steps": 2, "ascend": OFF},
    "text, evaluation": {
        **TEXT,
        "eval_dataset": "long",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 8,
        "ascend": OFF,
    },
    "text, 2 ranks": {**TEXT, **TWO, "cutoff_len": 1024, "ascend": OFF},
    "text, FSDP2": {**TEXT, **TWO, **shards("Qwen3DecoderLayer"), "cutoff_len": 1024, "ascend": OFF},
    "text, FSDP2, full": {
        **TEXT, **FULL, **TWO, **shards("Qwen3DecoderLayer"), "cutoff_len": 1024, "ascend": OFF,
    },
    "hybrid": {**HYBRID, "cutoff_len": 512},
    "hybrid, stock kernels": {**HYBRID, "cutoff_len": 256, "ascend": OFF},
    "hybrid, stock loss": {**HYBRID, "cutoff_len": 256, "ascend": NO_LOSS},
    "hybrid, no checkpointing": {**HYBRID, **NONE, "cutoff_len": 256, "ascend": OFF},
    "hybrid, all targets, 2 micro-batches": {
        **HYBRID, **LORA_ALL, "cutoff_len": 256, "gradient_accumulation_steps": 2, "ascend": OFF,
    },
    "hybrid, OFT": {**HYBRID, **OFT, "oft_target": "q_proj,v_proj", "cutoff_len": 256, "ascend": OFF},
    "hybrid, FSDP2": {
        **HYBRID, **TWO, **shards("Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"), "cutoff_len": 512,
        "ascend": OFF,
    },
    "vision-language, text rows": {**WORDS, "cutoff_len": 512, "ascend": OFF},
    "vision-language, pictures": {**PICTURES, "cutoff_len": 512, "ascend": OFF},
    "vision-language, pictures, fused kernels": {**PICTURES, "cutoff_len": 512},
    "vision-language, adapters in the tower": {
        **PICTURES, "cutoff_len": 512, "lora_target": None,
        "ascend": {**OFF, "targets": {"vision": {"modules": ["qkv", "proj"], "blocks": "last:4"}}},
    },
    "vision-language, no checkpointing": {
        **PICTURES, **NONE, "cutoff_len": 256, "per_device_train_batch_size": 1, "ascend": OFF,
    },
    "vision-language, OFT": {
        **PICTURES, **OFT, "oft_target": "q_proj,v_proj", "cutoff_len": 256, "ascend": OFF,
    },
    "vision-language, 2 ranks": {**PICTURES, **TWO, "cutoff_len": 1024, "ascend": OFF},
}  # fmt: skip

SIDE = 224  # of a picture; 8 x 8 tokens of 28 x 28 pixels


def write_data(folder: Path) -> Path:
    """Write rows longer than every `cutoff_len`, with pictures and without, and return their folder."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    answers = [" ".join(str((row * 37 + place * 101) % 977) for place in range(1500)) for row in range(48)]
    rows = [{"instruction": "1", "input": "", "output": answer} for answer in answers]
    Image.new("RGB", (SIDE, SIDE), "gray").save(folder / "picture.png")
    pictured = [
        {"instruction": "<image>1", "input": "", "output": answer, "images": ["picture.png"]}
        for answer in answers
    ]
    (folder / "long.json").write_text(json.dumps(rows), encoding="utf-8")
    (folder / "pictures.json").write_text(json.dumps(pictured), encoding="utf-8")
    columns = {"prompt": "instruction", "query": "input", "response": "output", "images": "images"}
    info = {
        "long": {"file_name": "long.json"},
        "pictures": {"file_name": "pictures.json", "columns": columns},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder
