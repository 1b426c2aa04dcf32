"""A peer: Transformers' Trainer and PEFT, non-re-entrant checkpointing, on a case of `cases.py`.

    python -m benchmarks.trainer CASE ASSETS OUTPUT_FOLDER

It reads no recipe and no host: what anybody would write who wants every layer checkpointed. Rows are laid out
as the host's templates do, so that losses are comparable. The last line of stdout is JSON: `losses` and
`grad_norms`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)

from benchmarks.cases import CASES, Case
from benchmarks.text_case import CUTOFF, LEARNING_RATE, RANK, STEPS, TARGETS

IGNORED = -100
LOGGED = {"losses": "loss", "grad_norms": "grad_norm"}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


class Texts:
    """Makes a batch of rows of text, all of them as long as the cutoff."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.tokenizer = case, AutoTokenizer.from_pretrained(folder)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids, labels = zip(*map(self.encode, rows), strict=True)
        inputs = torch.tensor(ids)
        return {
            "input_ids": inputs,
            "attention_mask": torch.ones_like(inputs),
            "labels": torch.tensor(labels),
        }

    def encode(self, row: dict[str, str]) -> tuple[list[int], list[int]]:
        prompt, answer = (
            self.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (self.case.question.format(row["instruction"]), f"{row['output']}<|im_end|>\n")
        )
        labels = [IGNORED] * len(prompt) + answer
        return (prompt + answer)[:CUTOFF], labels[:CUTOFF]


class Pictures:
    """Makes a padded batch of rows with a picture each."""

    def __init__(self, case: Case, folder: Path, pictures: Path) -> None:
        self.case, self.pictures = case, pictures
        self.processor = AutoProcessor.from_pretrained(folder)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        questions = [
            self.case.question.format(row["messages"][0]["content"].replace("<image>", IMAGE)) for row in rows
        ]
        answers = [f"{row['messages'][1]['content']}<|im_end|>\n" for row in rows]
        images = [Image.open(self.pictures / row["images"][0]).convert("RGB") for row in rows]
        texts = [question + answer for question, answer in zip(questions, answers, strict=True)]
        batch = dict(self.processor(text=texts, images=images, padding=True, return_tensors="pt"))
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        for line, length, answer in zip(labels, batch["attention_mask"].sum(1), answers, strict=True):
            supervised = len(self.processor.tokenizer(answer, add_special_tokens=False)["input_ids"])
            line[: length - supervised] = IGNORED
        return {**batch, "labels": labels}


def main(name: str, assets: Path, output_folder: str) -> None:
    (case,) = (one for one in CASES if one.name == name)
    set_seed(42)
    folder, data = assets / case.model, assets / case.folder
    pictured = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    kind = AutoModelForImageTextToText if pictured else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.bfloat16)
    model.config.use_cache = False
    model.enable_input_require_grads()
    model = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0, target_modules=TARGETS)
    )
    rows = json.loads((data / f"{case.dataset}.json").read_text(encoding="utf-8"))
    arguments = TrainingArguments(
        output_dir=output_folder,
        per_device_train_batch_size=case.batch,
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
    collate = Pictures(case, folder, data) if "images" in rows[0] else Texts(case, folder)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({key: [step[logged] for step in steps] for key, logged in LOGGED.items()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
