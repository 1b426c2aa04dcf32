"""benchmarks/peers.py without its runs: what it compares, and with what."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import peers, peers_swift
from benchmarks.cases import CASES
from benchmarks.measuring import Measured

STOCK = Measured(peak=1000, launches=500, losses=[2.0, 1.5], grad_norms=[1.0, 0.5])
RUNS = {
    "stock": STOCK,
    peers.EXACT: replace(STOCK, peak=1, launches=1),
    peers.OURS: Measured(peak=100, launches=90, losses=[2.001, 1.5], grad_norms=[1.1, 0.5]),
    "Trainer": replace(STOCK, peak=400, launches=600),
    "ms-swift": replace(STOCK, peak=200, launches=450, losses=[3.0, 3.0]),
}


def test_the_best_of_the_others_is_taken_for_each_figure_anew() -> None:
    found = peers.compare(CASES[0], RUNS)
    assert found == {"text_peak": 0.5, "text_launches": 0.2, "text_losses_equal": True}


@pytest.mark.parametrize(
    ("name", "losses"),
    [(peers.EXACT, [2.0, 1.500001]), (peers.OURS, [2.005, 1.5])],
    ids=["digit", "rounding"],
)
def test_losses_are_held_to_every_digit_or_to_rounding(name: str, losses: list[float]) -> None:
    found = peers.compare(CASES[0], {**RUNS, name: replace(RUNS[name], losses=losses)})
    assert not found["text_losses_equal"]


def test_what_is_missed_is_named() -> None:
    found = {"text_peak": 0.5, "text_launches": 0.51, "text_losses_equal": True}
    other = {"vlm_peak": 0.9, "vlm_launches": 0.8, "vlm_losses_equal": False}
    figures = peers.summarise({**found, **other})
    assert list(figures) == [
        "text_peak",
        "vlm_peak",
        "launches",
        "losses_equal",
        "text_launches",
        "vlm_launches",
    ]
    assert peers.missed(figures) == ["launches is 0.51, required is <= 0.5", "losses differ from stock's"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_programs_are_told_the_same(assets: Path, tmp_path: Path, case: peers.Case) -> None:
    recipe = case.host()
    words = case.swift_words(assets, tmp_path / "rows.json", tmp_path)
    told = dict(pairwise(words))
    assert told["--per_device_train_batch_size"] == str(recipe["per_device_train_batch_size"])
    assert told["--max_length"] == str(recipe["cutoff_len"])
    assert float(told["--learning_rate"]) == recipe["learning_rate"]
    assert told["--lora_rank"] == str(recipe["lora_rank"])
    rows = peers_swift.with_paths(assets / case.folder, case.dataset)
    assert len(rows) == len(json.loads((assets / case.folder / f"{case.dataset}.json").read_text()))
    assert all(Path(image).is_file() for row in rows for image in row.get("images", ()))
