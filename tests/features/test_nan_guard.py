"""Bad steps in a row end a run; what recovers, or was left out by a gradient scaler, does not."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import trainer as transformers_trainer

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.nan_callback import NanCallback, of
from llamafactory_ascend.features.nan_guard import BAD_STEPS, SKIPPED_STEPS, NanGuard
from llamafactory_ascend.host import platform
from llamafactory_ascend.patching import Ledger
from tests.sim_npu.available import unavailable_reason
from tests.training import adapted, trainer

GOOD, NAN, INF, DEAD = (0.5, 2.0), (math.nan, 0.0), (math.inf, 2.0), (0.0, 0.0)


def run(*steps: tuple[float, float], guard: NanGuard | None = None, max_steps: int = 1000) -> list[bool]:
    guard = guard or NanGuard()
    return [
        guard.judge(number, *step, skipped=False, last=number == max_steps)
        for number, step in enumerate(steps, guard.step + 1)
    ]


@pytest.mark.parametrize("bad", [NAN, INF, DEAD])
def test_three_bad_steps_in_a_row_end_the_run(bad: tuple[float, float]) -> None:
    assert run(GOOD, bad, bad) == [True, False, False]
    with pytest.raises(AscendError, match=r"step 4: .* 3 optimizer steps in a row .* from step 2 on"):
        run(GOOD, bad, bad, bad)
    assert BAD_STEPS == 3


@pytest.mark.parametrize("step", [(0.0, 1.5), (1e-9, 0.0)])
def test_a_zero_alone_is_no_bad_step(step: tuple[float, float]) -> None:
    """A first step whose adapter is still zero; rows that are known by heart."""
    assert run(*[step] * 10) == [True] * 10


def test_rows_without_labels_in_the_last_step_cost_no_run() -> None:
    """Its loss and gradients are 0, which leaves the weights of all steps before as they were."""
    assert run(GOOD, DEAD, DEAD, max_steps=3) == [True, False, False]
    with pytest.raises(AscendError, match="step 3: loss and gradients of 2 optimizer steps in a row are 0"):
        run(GOOD, NAN, DEAD, max_steps=3)


def test_a_hinge_loss_is_0_once_all_pairs_are_far_apart() -> None:
    assert run(*[DEAD] * 10, guard=NanGuard(zero_is_bad=False), max_steps=10) == [True] * 10
    with pytest.raises(AscendError):
        run(NAN, NAN, NAN, guard=NanGuard(zero_is_bad=False))


def test_a_run_that_recovers_goes_on_and_saves_again() -> None:
    assert run(NAN, NAN, GOOD, NAN, NAN, GOOD) == [False, False, True, False, False, True]


def test_a_run_does_not_end_well_in_a_bad_step() -> None:
    with pytest.raises(AscendError, match="gradients of the last optimizer step are not finite"):
        run(GOOD, NAN, max_steps=2)


def test_a_step_that_is_told_twice_counts_once() -> None:
    """The Trainer comes by again at the end of an epoch."""
    guard = NanGuard()
    for _ in range(5):
        assert guard.judge(1, *NAN, skipped=False, last=False) is False
    assert guard.bad == 1


def test_skipped_steps_of_fp16_are_no_bad_steps_until_no_gradient_can_be_left() -> None:
    guard = NanGuard()
    for step in range(1, SKIPPED_STEPS):
        assert guard.judge(step, math.inf, 2.0, skipped=True, last=False)
    with pytest.raises(AscendError, match="the gradients of 40 steps in a row overflowed in float16"):
        guard.judge(SKIPPED_STEPS, math.inf, 2.0, skipped=True, last=False)
    assert torch.finfo(torch.float16).smallest_normal / 2**10 == 65536 / 2**SKIPPED_STEPS  # above 0


def test_the_checkpoint_to_resume_from_is_one_that_has_made_a_good_step() -> None:
    guard = NanGuard()
    run(GOOD, guard=guard)
    guard.saved = "out/checkpoint-1"
    run(GOOD, GOOD, guard=guard)
    guard.saved = "out/checkpoint-3"
    with pytest.raises(AscendError) as caught:
        run(NAN, NAN, NAN, guard=guard)
    assert "resume from out/checkpoint-1, the last checkpoint known to be good" in caught.value.hint
    assert caught.value.hint.endswith("No checkpoint was saved in bad steps (out/checkpoint-3 is not)")


def train(assets: Path, folder: Path, *callbacks: Any, **changes: Any) -> Any:
    settings = {"max_steps": 8, "learning_rate": 1e30, "save_strategy": "steps", "save_steps": 1, **changes}
    found = trainer(adapted(assets / "qwen3"), folder, *callbacks, **settings)
    found.train()
    return found


@pytest.fixture
def patched() -> Iterator[None]:
    """The Trainer's steps are judged, as in a run of the host."""
    ledger = Ledger()
    record = ledger.add(platform.PATCHES[0])
    ledger.module_ready(transformers_trainer.__name__)
    assert (str(record.state), str(record.source)) == ("applied", "still needed")
    yield
    ledger.revert()


def test_fp16_may_overflow_until_its_scale_fits(assets: Path, tmp_path: Path, patched: None) -> None:
    """Beside the fused optimizer, the Trainer's default, Accelerate calls no step skipped."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    callback = NanCallback(NanGuard())
    settings = {"fp16": True, "use_cpu": False, "max_steps": 25, "dataloader_pin_memory": False}
    found = trainer(adapted(assets / "qwen3"), tmp_path, callback, **settings)
    found.accelerator.scaler._init_scale = 2.0**30
    found.train()
    norms = [entry["grad_norm"] for entry in found.state.log_history if "grad_norm" in entry]
    overflowed = [not math.isfinite(norm) for norm in norms]
    assert found.state.global_step == 25 and overflowed[:BAD_STEPS] == [True] * BAD_STEPS
    assert not overflowed[-1] and not found.accelerator.optimizer_step_was_skipped
    assert found.accelerator.scaler.get_scale() == 2.0 ** (30 - sum(overflowed))
    assert (callback.guard.bad, callback.guard.skipped) == (0, 0)


def test_stock_goes_on_with_a_loss_of_zero(assets: Path, tmp_path: Path) -> None:
    done = train(assets, tmp_path, save_total_limit=1)
    logs = [entry for entry in done.state.log_history if "loss" in entry]
    assert len(logs) == 8
    assert all(entry["loss"] == 0.0 and math.isnan(entry["grad_norm"]) for entry in logs[1:])
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"]  # of NaN, the only one


def test_ours_stops_and_keeps_the_checkpoint(assets: Path, tmp_path: Path, patched: None) -> None:
    callback = NanCallback(NanGuard())
    with pytest.raises(AscendError, match=r"step 4: .* from step 2 on"):
        train(assets, tmp_path, callback, save_total_limit=1)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert callback.guard.saved.endswith("checkpoint-1")
    assert of([object(), callback]) is callback

    healthy = train(assets, tmp_path / "healthy", NanCallback(NanGuard()), learning_rate=1e-3, max_steps=3)
    assert healthy.state.global_step == 3
    assert len(list((tmp_path / "healthy").glob("checkpoint-*"))) == 3
    without = train(assets, tmp_path / "without", max_steps=5)  # nobody's Trainer but ours is judged
    assert without.state.global_step == 5
