"""The preference trainers of the host without logits: stock's losses, rewards and gradients."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoTokenizer, Seq2SeqTrainingArguments

from llamafactory_ascend.features import loss as feature
from llamafactory_ascend.features.chunked_loss import ChunkedLoss
from tests.kernels.test_linear_cross_entropy import Largest
from tests.training import ATTENTION, load

# The entry point has made the patches wait for these two.
from llamafactory.hparams import FinetuningArguments  # isort: skip
from llamafactory.train.dpo.trainer import CustomDPOTrainer  # isort: skip
from llamafactory.train.kto.trainer import CustomKTOTrainer  # isort: skip

ROWS, LENGTH, WORDS = 4, 24, 640


def batch(stage: str) -> dict[str, Tensor]:
    """Rows of 24, 21, 18 and 15 tokens, the first 8 of each a prompt."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for prefix in ("", "kl_") if stage == "kto" else ("",):
        ids = torch.randint(12, 500, (ROWS, LENGTH), generator=generator)
        mask = torch.arange(LENGTH) < LENGTH - 3 * torch.arange(ROWS)[:, None]
        labels = ids.masked_fill(~mask, -100)
        labels[:, :8] = -100
        found |= {
            f"{prefix}input_ids": ids,
            f"{prefix}attention_mask": mask.long(),
            f"{prefix}labels": labels,
        }
    return {**found, "kto_tags": torch.tensor([True, False, False, True])} if stage == "kto" else found


def adapted(folder: Path) -> Any:
    torch.manual_seed(0)
    return get_peft_model(load(folder), LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False))


def trainer(folder: Path, model: Any, output: Path, stage: str, ref_model: Any = None, **more: Any) -> Any:
    kind = CustomKTOTrainer if stage == "kto" else CustomDPOTrainer
    return kind(
        model=model,
        ref_model=ref_model,
        finetuning_args=FinetuningArguments(stage=stage, pref_beta=0.3, **more),
        processor=None,
        args=Seq2SeqTrainingArguments(output_dir=str(output), use_cpu=True, report_to="none"),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        data_collator=list,
        train_dataset=[{"input_ids": [1]}],
    )


def step(host: Any, stage: str) -> tuple[Tensor, dict[str, Any], dict[str, Tensor], int]:
    """A step's loss, what the host logs of it, the gradients, and the most numbers that a tensor had."""
    host.model.zero_grad()
    with Largest() as largest:
        loss, metrics = host.get_batch_loss_metrics(host.model, batch(stage))
        loss.backward()
    gradients = {name: p.grad for name, p in host.model.named_parameters() if p.grad is not None}
    return loss.detach(), metrics, copy.deepcopy(gradients), largest.numbers


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[ChunkedLoss]:
    found: list[ChunkedLoss] = []
    monkeypatch.setattr(feature, "_losses", found)
    return found


def compare(ours: tuple[Any, ...], stock: tuple[Any, ...]) -> None:
    torch.testing.assert_close(ours[0], stock[0], rtol=2e-5, atol=0)
    assert ours[1].keys() == stock[1].keys()
    for name, value in stock[1].items():
        assert ours[1][name] == pytest.approx(value, rel=2e-5, abs=2e-5), name
    assert ours[2].keys() == stock[2].keys()
    for name, gradient in stock[2].items():
        assert (ours[2][name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize(
    ("stage", "more", "calls"),
    [
        ("dpo", {"pref_loss": "sigmoid"}, 2),
        ("dpo", {"pref_loss": "ipo", "pref_ftx": 0.5}, 2),
        ("dpo", {"pref_loss": "orpo"}, 1),
        ("dpo", {"pref_loss": "simpo"}, 1),
        ("kto", {"pref_ftx": 0.5}, 4),
    ],
    ids=["dpo", "ipo with ftx", "orpo", "simpo", "kto"],
)
def test_step_is_stocks_without_its_logits(
    assets: Path, tmp_path: Path, losses: list[ChunkedLoss], stage: str, more: dict[str, Any], calls: int
) -> None:
    """With LoRA the reference is the same model with its adapter off."""
    model = adapted(assets / "qwen3")
    host = trainer(assets / "qwen3", model, tmp_path, stage, **more)
    stock = step(host, stage)
    losses.append(ChunkedLoss(model.get_base_model()))
    ours = step(host, stage)
    compare(ours, stock)
    assert losses[0].calls == calls and losses[0].asked is None
    # A chunk's logits are 32 x 640; as many numbers as the weights of the head, at most, are seen at a time.
    assert (ours[3], stock[3]) == (WORDS * 64, ROWS * LENGTH * WORDS)


def test_all_weights_trained_beside_a_reference_model(
    assets: Path, tmp_path: Path, losses: list[ChunkedLoss]
) -> None:
    model, reference = load(assets / "qwen3"), load(assets / "qwen2")
    more = {"pref_loss": "sigmoid", "finetuning_type": "full"}
    host = trainer(assets / "qwen3", model, tmp_path, "dpo", reference, **more)
    stock = step(host, "dpo")
    losses += [ChunkedLoss(model), ChunkedLoss(reference)]
    compare(step(host, "dpo"), stock)
    assert "lm_head.weight" in stock[2] and [loss.calls for loss in losses] == [1, 1]


def test_reference_model_whose_head_is_not_plain_has_its_logits(
    assets: Path, tmp_path: Path, losses: list[ChunkedLoss]
) -> None:
    model, reference = load(assets / "qwen3"), load(assets / "qwen2")
    host = trainer(
        assets / "qwen3", model, tmp_path, "dpo", reference, pref_loss="sigmoid", finetuning_type="full"
    )
    stock = step(host, "dpo")
    losses.append(ChunkedLoss(model))
    compare(step(host, "dpo"), stock)
