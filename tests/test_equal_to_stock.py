"""With `kernels: off` a run computes what stock computes, to the last digit that either prints.

Off an NPU that holds by default: nothing is replaced there.
"""

import json
from pathlib import Path
from typing import Any

from tests.running import Result, Train

TIMES = {"elapsed_time", "remaining_time"}


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The host's own log of a run without the fields that tell the time."""
    lines = (folder / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def with_and_without(train: Train, **recipe: Any) -> tuple[Result, Result]:
    stock, ours = (train(plugin=plugin, **recipe) for plugin in (False, True))
    assert (stock.code, ours.code) == (0, 0), stock.text[-3000:] + ours.text[-3000:]
    assert not (stock.output / "ascend_report.json").exists()
    return stock, ours


def test_a_plain_cpu_computes_what_stock_does(train: Train) -> None:
    """LoRA on every linear layer, so that stock checkpoints every layer too: nothing may differ at all."""
    stock, ours = with_and_without(train, npu=False, model="qwen3", template="qwen3", lora_target="all")
    assert ours.report["device"]["type"] == "cpu"
    assert ours.report["ranks"][0]["checkpointing"]["checkpointed"] == {"text": 4}
    log = log_of(ours.output)
    assert log == log_of(stock.output)
    assert [sorted(line) for line in log[:4]] == [
        ["current_steps", "epoch", "loss", "lr", "percentage", "total_steps"]
    ] * 4
    assert ours.grad_norms == stock.grad_norms
    assert len(set(ours.grad_norms)) == 4


def test_the_text_case_computes_what_stock_does_in_an_eighth_of_the_memory(train: Train) -> None:
    """A 16-layer hybrid with adapters on its 4 attention layers, 1,024 tokens, on the simulated NPU."""
    stock, ours = with_and_without(
        train,
        model="qwen3_5_big",
        dataset="long",
        cutoff_len=1024,
        per_device_train_batch_size=1,
        max_steps=2,
        learning_rate=1.0e-4,
        bf16=True,
        gradient_checkpointing=True,
        ascend={"kernels": "off"},
    )
    assert log_of(ours.output) == log_of(stock.output)
    assert ours.grad_norms == stock.grad_norms
    assert ours.report["ranks"][0]["checkpointing"]["checkpointed"] == {"text": 13}
    assert stock.peak() / ours.peak() > 7.5
