"""`checkpointing: auto`: bounds of what a batch needs, and that no step is ever above its budget."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llamafactory_ascend import device
from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.checkpointing_budget import Batch, budget_bytes, covers, size_of
from tests.features.checkpointing_training import MIB, WIDTH, Training

# What a batch needs.


def test_a_size_is_the_shapes_of_all_inputs() -> None:
    ids, pictures = torch.zeros(2, 5, dtype=torch.long), [torch.zeros(3, 4), [torch.zeros(2)]]
    assert size_of((ids,), {"pixel_values": pictures, "use_cache": False, "mask": None}) == {
        "0": (2, 5),
        "pixel_values": (14,),
    }


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"ids": (2, 8)}, {"ids": (2, 8)}, True),
        ({"ids": (2, 8)}, {"ids": (1, 7)}, True),
        ({"ids": (2, 8)}, {"ids": (1, 9)}, False),
        ({"ids": (2, 8)}, {"ids": (3, 5)}, False),
        ({"ids": (2, 8)}, {"ids": (16,)}, False),
        ({"ids": (2, 8)}, {"ids": (2, 8), "pixels": (1,)}, False),
        ({"ids": (2, 8), "pixels": (4, 3)}, {"ids": (1, 2)}, True),
    ],
)
def test_a_batch_covers_what_is_nowhere_larger(one: Any, other: Any, expected: bool) -> None:
    assert covers(one, other) is expected


SIZE = {"ids": (1, 8)}


def test_layers_are_kept_as_far_as_their_bytes_fit() -> None:
    batch = Batch(SIZE, 100, [10, 10, 30])
    assert batch.needs == [100, 110, 120, 150]
    assert [batch.fit(room) for room in (99, 100, 119, 120, 149, 150, 999)] == [0, 0, 1, 2, 2, 3, 3]


def test_a_bound_falls_to_what_was_measured_once_and_rises_always() -> None:
    batch = Batch(SIZE, 100, [10, 10, 30])
    batch.learn(SIZE, 2, 105)
    assert batch.needs == [100, 105, 105, 135]
    batch.learn(SIZE, 2, 101)  # fewer supervised positions
    assert batch.needs == [100, 105, 105, 135]
    batch.learn(SIZE, 0, 99)
    assert batch.needs == [99, 105, 105, 135]
    batch.learn({"ids": (1, 4)}, 3, 20)  # a shorter one says nothing about this size
    assert batch.needs == [99, 105, 105, 135]
    batch.learn({"ids": (1, 4)}, 0, 107)  # unless it needs more
    assert batch.needs == [107, 113, 113, 143]


@pytest.mark.parametrize(("setting", "expected"), [(0.5, 500), (1.0, 1000), (300, 300)])
def test_a_budget_is_a_share_or_a_size(setting: float, expected: int) -> None:
    assert budget_bytes(setting, available=1000) == expected


# Steps on the simulated NPU.


@pytest.fixture(scope="module")
def peaks() -> Iterator[tuple[int, int]]:
    """The peaks of steps of 512 rows with all layers recomputed and with none."""
    gc.disable()  # of what other tests have left
    found = []
    for kept in (0, 8):
        training = Training(None)
        training.function.kept = frozenset(map(id, list(training.model.layers)[:kept]))
        training.step(512)
        training.step(512)
        found.append(training.peak)
        del training  # before the next one is made
    yield found[0], found[1]
    gc.enable()
    device._peaks.clear()


def test_steps_fill_the_budget_and_never_pass_it(peaks: tuple[int, int]) -> None:
    full, none = peaks
    assert none > 1.5 * full
    losses = [Training(None).step(512)]
    kept = []
    for share in (0, 30, 50, 80, 110):
        budget = full + (none - full) * share // 100
        training = Training(budget)
        assert [training.step(512) for _ in range(5)][:1] == losses
        assert training.peak <= budget
        kept.append(training.kept)
        section = training.run.facts["checkpointing"]
        assert (section["kept"].get("text", 0), section["problems"]) == (training.kept, [])
        assert section["checkpointed"].get("text", 0) == 8 - training.kept
        del training  # before the next one is made
    assert kept[0] == 0
    assert kept == sorted(set(kept))
    assert kept[-1] == 8


def test_a_step_that_keeps_layers_computes_the_same(peaks: tuple[int, int]) -> None:
    full = Training(None)
    losses = [full.step(512) for _ in range(4)]
    auto = Training(sum(peaks) / 2)
    assert [auto.step(512) for _ in range(4)] == losses
    assert auto.kept > 0
    weights = zip(full.model.parameters(), auto.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


def test_a_longer_batch_is_recomputed_and_measured_before_it_keeps_anything(peaks: tuple[int, int]) -> None:
    training = Training(peaks[1])
    kept = []
    for rows in (256, 256, 512, 512, 512, 512, 256):
        training.step(rows)
        kept.append(training.kept)
    assert kept[:3] == [0, 8, 0]
    assert 0 < kept[3] < 8
    assert kept[-1] == kept[-2] < 8
    assert training.peak <= peaks[1]


def test_memory_that_something_else_takes_is_not_used(peaks: tuple[int, int]) -> None:
    training = Training(peaks[1])
    for _ in range(3):
        training.step(512)
    before = training.kept
    taken = torch.empty((peaks[1] - peaks[0]) // 2, dtype=torch.uint8, device="npu")
    training.step(512)
    assert 0 < training.kept < before
    assert training.peak <= peaks[1]
    del taken
    training.step(512)
    training.step(512)
    assert training.kept == before


def test_micro_batches_are_measured_each(peaks: tuple[int, int]) -> None:
    training = Training(peaks[1])
    for _ in range(4):
        training.step(128, 512, 512)
    assert 0 < training.kept < 8  # the gradients of the first are there when the last begins
    assert training.peak <= peaks[1]


def test_a_budget_that_a_step_does_not_fit_into_is_said(peaks: tuple[int, int]) -> None:
    training = Training(peaks[0] / 2)
    training.step(512)
    training.step(512)
    assert training.kept == 0
    (finding,) = training.run.findings
    assert finding.message.endswith("MiB although every layer is recomputed")
    assert training.run.decisions["checkpointing"].choice == checkpointing.OURS


def test_two_forward_passes_before_a_backward_end_it(peaks: tuple[int, int]) -> None:
    training = Training(peaks[1])
    for _ in range(2):
        training.step(512)
    assert training.kept > 0
    one, other = (training.model(torch.ones(4, WIDTH, device="npu"))["loss"] for _ in range(2))
    (one + other).backward()
    assert "the model is called twice before a backward" in training.run.findings[0].message
    training.step(512)
    assert training.kept == 0


def test_two_ranks_keep_as_many_as_the_one_with_the_longer_batches(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.features.checkpointing_training"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env={**os.environ, "SIM_NPU_DEVICES": "2"},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    shorter, longer = (json.loads(rank.communicate(timeout=240)[0].splitlines()[-1]) for rank in ranks)
    assert shorter["kept"] == longer["kept"]
    assert 0 < shorter["kept"][1] < 8  # in the first it has nothing measured, in the last nothing as long
    assert shorter["kept"][::2] == [0, 0]
    assert max(shorter["peak"], longer["peak"]) <= 7 * MIB
