"""Packed batches as the host makes them: no sample of a hybrid influences another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask
from llamafactory.data.template import get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from tests.kernels import tiny
from tests.kernels.reference import error

RULE = {"gated_delta_rule": "pytorch", "causal_conv1d": "pytorch"}
LENGTHS = (37, 70, 21)  # and no padding: 128 tokens


@pytest.fixture(scope="module")
def model(assets: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(assets / "qwen3_5", attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(100, 600, (length,), generator=generator).tolist() for length in LENGTHS]


def collate(folder: Path, model: Any, rows: list[list[list[int]]]) -> dict[str, Any]:
    """Return the batch that `neat_packing` gives for rows of packed samples.

    A row without an image would get a dummy one, for which the host's collator makes a mask of a wrong size;
    the template of text models makes none.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = get_template_and_fix_tokenizer(tokenizer, DataArguments(template="qwen3_nothink"))
    collator = SFTDataCollatorWith4DAttentionMask(
        template=template, model=model, tokenizer=tokenizer, processor=AutoProcessor.from_pretrained(folder),
        pad_to_multiple_of=8, block_diag_attn=True, attn_implementation="sdpa", compute_dtype=torch.float32,
    )  # fmt: skip
    features = []
    for row in rows:
        bounds = [0]
        for sample in row:
            bounds.append(bounds[-1] + len(sample))
        features.append(
            {
                "input_ids": [token for sample in row for token in sample],
                "attention_mask": [place for place, sample in enumerate(row, 1) for _ in sample],
                "labels": [token for sample in row for token in sample],
                "packing_params": {"sequence_boundaries": bounds, "right_padding_length": 0},
            }
        )
    batch: dict[str, Any] = collator(features)
    return batch


def logits(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    with torch.no_grad():
        result: torch.Tensor = model(**given, use_cache=False).logits
    return result


def test_rows_of_the_host(assets: Path, model: Any, samples: list[list[int]]) -> None:
    """Two rows with the samples in another order: each gives the logits that it gives alone.

    Stock's mask keeps the attention layers apart; the DeltaNet layers carry on.
    """
    of = tiny.family("qwen3_5")
    alone = [logits(model, {"input_ids": torch.tensor([sample])})[0] for sample in samples]
    batch = collate(assets / "qwen3_5", model, [samples, samples[::-1]])
    assert batch["position_ids"].shape == (4, 2, 128) and batch["attention_mask"].dim() == 4
    expected = torch.stack([torch.cat(alone), torch.cat(alone[::-1])])
    assert error(logits(model, batch), expected) > 5e-3
    done, said = tiny.put(model, of, tiny.choose(of, RULE, packed=True), packed=True)
    try:
        assert error(logits(model, batch), expected) < 2e-6
        del batch["position_ids"]  # the mask alone, positions run through: the rotary embedding is relative
        assert error(logits(model, batch), expected) < 2e-5
    finally:
        done.revert()
    assert said == []


def test_training_through_checkpoints(assets: Path, model: Any, samples: list[list[int]]) -> None:
    """What backward recomputes sees the boundaries of its own batch, although another came in between."""
    from llamafactory_ascend.features import checkpointing

    of = tiny.family("qwen3_5")
    done, _ = tiny.put(model, of, tiny.choose(of, RULE, packed=True), packed=True)
    batches = [collate(assets / "qwen3_5", model, [row]) for row in (samples, samples[::-1])]
    inputs = [{k: b[k] for k in ("input_ids", "attention_mask", "position_ids")} for b in batches]
    weight = model.model.language_model.layers[0].linear_attn.conv1d.weight
    found = []
    try:
        for checkpointed in (False, True):
            if checkpointed:
                checkpointing.enable(model.train())
            losses = [model(**given, use_cache=False).logits.float().square().mean() for given in inputs]
            found.append(torch.autograd.grad(losses[0], weight)[0])
    finally:
        done.revert()
        model.eval()
    assert error(found[1], found[0]) < 1e-6
