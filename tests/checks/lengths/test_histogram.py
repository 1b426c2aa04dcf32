"""Counters of a fixed size: percentiles, bins, steps and labels against what a list of all rows gives."""

import math
import random

import pytest
from transformers import Trainer, TrainingArguments

from llamafactory_ascend.checks.lengths.histogram import Histogram, rounded
from llamafactory_ascend.checks.lengths.steps import left_to_train, steps
from llamafactory_ascend.checks.lengths.totals import Labels


def made(lengths: list[int]) -> Histogram:
    found = Histogram()
    for place, length in enumerate(lengths):
        found.add(length, f"row {place}")
    return found


def test_percentiles_are_those_of_all_rows() -> None:
    stream = random.Random(0)
    lengths = [int(stream.lognormvariate(5, 1.2)) for _ in range(5000)]
    found, half = made(lengths[:2000]), made(lengths[2000:])
    found.merge(half)
    ordered = sorted(lengths)
    for part in (0.5, 0.9, 0.95, 0.99, 1.0):
        assert found.percentile(part) == ordered[math.ceil(part * len(ordered)) - 1]
    assert (found.rows, found.total, found.longest) == (5000, sum(lengths), max(lengths))
    assert found.above(300) == sum(length > 300 for length in lengths)
    assert Histogram().percentile(0.5) == 0


def test_long_rows_are_rounded_up_and_take_no_room() -> None:
    """A length that is named for `cutoff_len` must keep its row: never less than the row, hardly more."""
    stream = random.Random(0)
    lengths = [stream.randint(1, 1 << 24) for _ in range(20_000)]
    for length in lengths:
        assert length <= rounded(length) <= length * (1 + 2**-15)
        assert rounded(length) == length or length > 65_535
    found = made([1 << 20] * 1000 + list(range(1 << 22, (1 << 22) + 5000)))
    assert len(found.counts) < 100
    assert found.percentile(1) == found.longest == (1 << 22) + 4999


@pytest.mark.parametrize("lengths", [[5], [1, 1000], [3, 3, 4, 70], list(range(1, 500)), [0, 1]])
def test_bins_hold_every_row_once_and_have_round_edges(lengths: list[int]) -> None:
    bins = list(made(lengths).bins(16))
    assert len(bins) <= 16 and sum(rows for *_, rows in bins) == len(lengths)
    for first, last, rows in bins:
        assert rows == sum(first <= length <= last for length in lengths)
    widths = {last - first + 1 for first, last, _ in bins}
    assert len(widths) == 1 and str(widths.pop()).rstrip("0") in ("1", "2", "5")


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 64, 65])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_steps_are_the_trainers(rows: int, accumulation: int, drop_last: bool, tmp_path: str) -> None:
    recipe = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 2.5,
        "dataloader_drop_last": drop_last,
    }
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **recipe)
    batches = range(rows // 4 if drop_last else math.ceil(rows / 4))
    trainer = Trainer.__new__(Trainer)
    trainer.args = arguments
    trainer.get_sp_size = lambda: 1
    trainer.get_total_train_batch_size = lambda args: 4 * accumulation
    trainer.num_examples = lambda loader: rows
    found = steps(rows, recipe, 1)
    if len(batches):
        _, per_epoch, *_, total = trainer.set_initial_training_values(arguments, batches)
        assert (found.per_epoch, found.total) == (per_epoch, total)
    assert steps(64, {"per_device_train_batch_size": 4, "max_steps": 7}, 3).total == 7
    assert steps(64, {"per_device_train_batch_size": 4}, 3).per_epoch == 6


def test_what_an_evaluation_takes_is_what_datasets_takes() -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"a": list(range(33))})
    for size in (0.1, 0.5, 7.0):
        given = int(size) if size > 1 else size
        assert left_to_train(33, size) == len(rows.train_test_split(test_size=given)["train"])


def test_labels_of_turns() -> None:
    pairs = [(5, 3), (4, 2), (6, 1)]
    assert Labels().count(pairs) == 6
    assert Labels(on_prompt=True).count(pairs) == 21
    assert Labels(last_only=True).count(pairs) == 1
    assert Labels(end_before_turn=True).count(pairs) == 6 + 2 + 1
