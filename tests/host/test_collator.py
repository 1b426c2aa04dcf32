"""Position ids of packed rows: as long as the rows, whatever `cutoff_len` is."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llamafactory_ascend import run as run_module
from llamafactory_ascend.host import collator
from tests.running import Train


@pytest.fixture
def training() -> Iterator[None]:
    now = run_module.current()
    before, now.arguments = now.arguments, SimpleNamespace()  # type: ignore[assignment]
    yield
    now.arguments = before


def collated(**batch: Any) -> Any:
    return collator.collate(lambda of, features: dict(batch), None, [])


def test_positions_reach_the_length_of_their_rows(training: None) -> None:
    ids, positions = torch.ones(2, 8), torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    found = collated(input_ids=ids, position_ids=positions)["position_ids"]
    assert found.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 0, 1, 2, 0, 0, 0]]
    axes = torch.arange(24).reshape(3, 1, 8)
    assert collated(input_ids=ids, position_ids=axes)["position_ids"] is axes
    assert set(collated(input_ids=ids)) == {"input_ids"}


def test_nothing_is_touched_outside_a_run() -> None:
    assert run_module.current().arguments is None
    positions = torch.zeros(1, 5)
    assert collated(input_ids=torch.ones(1, 8), position_ids=positions)["position_ids"] is positions


@pytest.mark.parametrize("model, template", [("qwen3_5_8l", "qwen3_5_nothink"), ("qwen3", "qwen3")])
def test_a_text_model_trains_packed_at_any_length(train: Train, model: str, template: str) -> None:
    """The hybrid with a template that adds a placeholder image, and a dense model."""
    packed = {"model": model, "template": template, "neat_packing": True, "cutoff_len": 123, "max_steps": 1}
    ours = train(**packed)
    assert ours.code == 0, ours.text[-4000:]
    assert len(ours.losses) == 1


def test_stock_ends_with_an_error_of_shapes(train: Train) -> None:
    """0.9.5; the next release does with flash attention only."""
    stock = train(
        plugin=False, model="qwen3", template="qwen3", neat_packing=True, cutoff_len=123, max_steps=1
    )
    assert stock.code != 0 and "must match the size" in stock.text
