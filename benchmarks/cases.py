"""The cases of the peers: a model, its data, and the same training in the words of each program."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from benchmarks.text_case import CUTOFF, DATA, LEARNING_RATE, MODEL, RANK, RECIPE, STEPS, TARGETS
from tests.assets import build
from tests.assets.models import SMALL, TOKENS
from tests.assets.tokenizer import make_tokenizer

VOCABULARY = 65_536
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """One training of three steps.

    Attributes:
        name: in the figures, `NAME_peak` and `NAME_launches`.
        model, folder, dataset: names in the folder of assets.
        batch: rows of a step.
        question: what stands before a row's answer; `{}` is the row's question.
        recipe: what LLaMA-Factory is told beside that.
        swift: the model type and template of ms-swift, and what else it is told.
    """

    name: str
    model: str
    folder: str
    dataset: str
    batch: int
    question: str
    recipe: dict[str, Any]
    swift: tuple[str, ...]

    def host(self) -> dict[str, Any]:
        """Return the recipe, but for the assets' `dataset_dir`."""
        own = {"model": self.model, "dataset": self.dataset, "per_device_train_batch_size": self.batch}
        return {**RECIPE, **own, **self.recipe}

    def swift_words(self, assets: Path, rows: Path, output: Path) -> list[str]:
        """Return what follows `swift sft`: the same training, with the host's optimizer."""
        kind, *more = self.swift
        options = {
            "model": assets / self.model,
            "model_type": kind,
            "template": kind,
            "dataset": rows,
            "output_dir": output,
            "max_length": CUTOFF,
            "truncation_strategy": "right",
            "tuner_type": "lora",
            "lora_rank": RANK,
            "lora_alpha": 2 * RANK,
            "lora_dropout": 0,
            "torch_dtype": "bfloat16",
            "bf16": "true",
            "per_device_train_batch_size": self.batch,
            "gradient_accumulation_steps": 1,
            "max_steps": STEPS,
            "logging_steps": 1,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "linear",
            "warmup_ratio": 0,
            "weight_decay": 0,
            "adam_beta2": 0.999,
            "check_model": "false",
            "report_to": "none",
            "save_strategy": "no",
        }
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        return [*words, "--target_modules", *TARGETS, *more]


TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CASES = (
    Case("text", MODEL, "data", DATA, 1, f"{TURN}<think>\n\n</think>\n\n", {}, ("qwen3_5",)),
    Case(
        "vlm",
        "vlm",
        "vlm_data",
        "tiny_mm",
        4,
        f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{TURN}",
        {"template": "qwen2_vl", "gradient_checkpointing": None},
        # it takes the image token of the real tokenizer for granted
        ("qwen2_5_vl", "--external_plugins", str(ROOT / "benchmarks" / "peers_swift_plugin.py")),
    ),
    Case("vocab", "vocabulary", "data", DATA, 1, TURN, {"template": "qwen3_nothink"}, ("qwen3",)),
)


def make_vocabulary_model(folder: Path) -> None:
    """Save a dense text model of 8 layers whose head is most of it, in bfloat16."""
    size = {
        **{**TOKENS, "vocab_size": VOCABULARY},
        **SMALL,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    transformers.set_seed(0)
    config = transformers.Qwen3Config(**size, head_dim=32, tie_word_embeddings=False)
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


OWN_MODELS: dict[str, Callable[[Path], None]] = {"vocabulary": make_vocabulary_model}


def build_assets(assets: Path) -> None:
    """Make the models and data of all cases, unless they are there."""
    names = {name for case in CASES for name in (case.model, case.folder)}
    build(assets, sorted(names - OWN_MODELS.keys()))
    for name, make in OWN_MODELS.items():
        if not (assets / name).exists():
            make(assets / name)
