"""The text case: LoRA on the attention of a 16-layer Qwen3.5 hybrid, 1,024 tokens, bfloat16."""

from typing import Any

MODEL = "qwen3_5_big"  # of tests.assets: 12 DeltaNet and 4 attention layers, hidden size 256, random weights
DATA = "long"
CUTOFF = 1024
RANK = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
STEPS = 3
LEARNING_RATE = 1.0e-4

RECIPE: dict[str, Any] = {
    "model": MODEL,
    "dataset": DATA,
    "cutoff_len": CUTOFF,
    "lora_rank": RANK,
    "lora_target": ",".join(TARGETS),
    "per_device_train_batch_size": 1,
    "max_steps": STEPS,
    "learning_rate": LEARNING_RATE,
    "bf16": True,
    "gradient_checkpointing": True,
    "ascend": {"kernels": "off"},  # stock's operators, so that every digit can be compared
}
