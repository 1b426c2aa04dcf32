"""The peer of the checkpointing benchmark: Transformers' Trainer and PEFT, non-re-entrant, the same batches.

    python -m benchmarks.checkpointing_trainer MODEL_FOLDER DATA_FILE OUTPUT_FOLDER

It reads no recipe and no host: what anybody would write who wants every layer checkpointed. Rows are laid out
as the host's template `qwen3_5_nothink` does, so the losses, in the last line of stdout, are comparable.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, AutoTokenizer, Trainer, TrainingArguments, set_seed

from benchmarks.text_case import CUTOFF, LEARNING_RATE, RANK, STEPS, TARGETS

IGNORED = -100
LOGGED = {"losses": "loss", "grad_norms": "grad_norm"}


def encode(tokenizer: Any, row: dict[str, str]) -> dict[str, list[int]]:
    """Return the token ids of a conversation and its labels, of the answer alone."""
    question = (
        f"<|im_start|>user\n{row['instruction']}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    prompt, answer = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (question, f"{row['output']}<|im_end|>\n")
    )
    labels = [IGNORED] * len(prompt) + answer
    return {"input_ids": (prompt + answer)[:CUTOFF], "labels": labels[:CUTOFF]}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Stack rows of equal length."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def main(model_folder: str, data_file: str, output_folder: str) -> None:
    set_seed(42)
    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.bfloat16)
    model.config.use_cache = False
    model.enable_input_require_grads()
    model = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0, target_modules=TARGETS)
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rows = json.loads(Path(data_file).read_text(encoding="utf-8"))
    arguments = TrainingArguments(
        output_dir=output_folder,
        per_device_train_batch_size=1,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=LEARNING_RATE,
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        report_to="none",
        save_strategy="no",
        remove_unused_columns=False,
        seed=42,
    )
    data = [encode(tokenizer, row) for row in rows]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({key: [step[name] for step in steps] for key, name in LOGGED.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
