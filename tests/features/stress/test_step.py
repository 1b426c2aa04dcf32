"""A full-size step before the first finds what does not fit, and leaves no trace where all fits."""

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import stress
from llamafactory_ascend.features.stress import full_rows, snapshot
from llamafactory_ascend.features.stress.callback import Stress
from llamafactory_ascend.features.stress.refusal import Shortage, wanted
from llamafactory_ascend.launching import signals
from llamafactory_ascend.run import Arguments, Run
from tests.features.stress.worker import equal, left, prepared, run_of
from tests.running import Train, environment
from tests.sim_npu.available import unavailable_reason

PICTURE, PAD = 7, 0


def test_a_row_becomes_as_long_as_it_may_be_and_keeps_what_it_says() -> None:
    row = {
        "input_ids": [5, 6, 8, 9],
        "attention_mask": [1, 1, 1, 1],
        "labels": [-100, -100, 8, 9],
        "images": [],
    }
    full = full_rows.lengthen(row, 8, PAD)
    assert full["input_ids"] == [5, 6, 8, 9, 8, 9, 8, PAD]
    assert full["labels"] == [-100, -100, 8, 9, 8, 9, 8, -100]
    assert full["attention_mask"] == [1] * 7 + [0]
    assert row["input_ids"] == [5, 6, 8, 9]
    assert full_rows.lengthen(row, 4, PAD)["input_ids"] == [5, 6, 8, PAD]


def test_both_answers_of_a_pair_are_lengthened() -> None:
    row = {
        f"{which}_{name}": [1, 2]
        for which in ("chosen", "rejected")
        for name in ("input_ids", "attention_mask", "labels")
    }
    full = full_rows.lengthen(row, 16, PAD)
    assert {key: len(value) for key, value in full.items()} == dict.fromkeys(row, 16)


@pytest.mark.parametrize("more", [{"position_ids": [0, 1]}, {"images": ["a.png"]}])
def test_a_full_row_is_left_as_it_is(more: dict[str, Any]) -> None:
    """A packed one; one with a picture that would lose its placeholders."""
    row = {"input_ids": [PICTURE, 1, 2], "attention_mask": [1] * 3, "labels": [1] * 3, **more}
    assert full_rows.lengthen(row, 3, PAD) == row


def test_the_rows_with_the_most_pictures_are_taken() -> None:
    rows = [{"input_ids": [PICTURE] * count + [1] * (9 - count)} for count in (0, 3, 1)]
    counts = [row["input_ids"].count(PICTURE) for row in full_rows.fullest(rows, 4, [PICTURE])]
    assert counts == [3, 1, 0, 3]
    assert full_rows.fullest(rows, 2, []) == rows[:2]


def test_what_cannot_be_put_back_is_refused_before_anything_is_loaded() -> None:
    def arguments(stage: str = "sft", **training: Any) -> Arguments:
        defaults = {"do_train": True, "optim": "adamw_torch", "deepspeed_plugin": None}
        found = SimpleNamespace(**{**defaults, **training})
        none = SimpleNamespace()
        return Arguments(none, none, found, SimpleNamespace(stage=stage), none)

    run = Run()
    run.settings = run.settings.model_copy(update={"stress": True})
    stress.ascend_arguments(run, arguments())
    for refused, reason in (
        (arguments("ppo"), "`stage: ppo` generates its rows"),
        (arguments(deepspeed_plugin="zero2"), "DeepSpeed keeps weights"),
        (arguments(torch_compile=True), "`torch_compile`: what is compiled"),
        (arguments(optim="lomo"), "`optim: lomo` updates weights within backward"),
    ):
        with pytest.raises(AscendError, match=reason):
            stress.ascend_arguments(run, refused)
    stress.ascend_arguments(run, arguments("ppo", do_train=False))


SHORTAGE = Shortage(
    1, "backward", wanted=300, allocated=900, peak=1000, before=200, total=1000, rows=2, cutoff_len=800,
    checkpointed=False,
)  # fmt: skip


def test_a_shortage_says_how_much_where_and_what_to_type() -> None:
    assert SHORTAGE.what() == (
        "rank 1: out of memory in backward of the full-size step (`ascend.stress`), which is 2 x 800 tokens "
        "a micro-batch: 300 bytes wanted, 900 allocated of 1,000 on the device (peak 1,000, 200 before the "
        "step)"
    )
    assert SHORTAGE.fitting() == 576  # (1000 - 200) / (1000 + 300 - 200) of 800, in eights
    for part in (
        "lower `cutoff_len` (a guess: 576, if",
        "`per_device_train_batch_size: 1`",
        "full}`, or",
    ):
        assert part in SHORTAGE.hint()


def test_the_optimizer_does_not_shrink_with_the_rows() -> None:
    hint = Shortage(**{**vars(SHORTAGE), "phase": "optimizer"}).hint()
    assert "cutoff_len" not in hint and "fsdp" in hint
    evaluation = Shortage(**{**vars(SHORTAGE), "phase": "evaluation", "before": 2000}).hint()
    assert "`per_device_eval_batch_size: 1`" in evaluation and "a guess" not in evaluation


@pytest.mark.parametrize(
    ("size", "count"), [("1.50 MiB", 1_572_864), ("2.00 GiB", 2**31), ("512 bytes", 512)]
)
def test_what_was_wanted_is_read_from_the_message(size: str, count: int) -> None:
    assert wanted(f"NPU out of memory. Tried to allocate {size} (NPU 0; 12.00 MiB total)") == count
    assert wanted("something else") == 0


def test_random_states_come_back() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with snapshot.random_states(torch.device("cpu")):
        first = draw()
    assert draw() == first
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_fp16_scales_by_one_for_the_step_alone() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    with snapshot.loss_scale(scaler):
        assert scaler.scale(torch.ones(())) == 1
    assert scaler.scale(torch.ones(())) == 2**30
    assert scaler.state_dict()["scale"] == 2.0**30


@pytest.fixture(autouse=True)
def signals_as_before() -> Any:
    yield
    signals.requests.end()


def test_what_follows_is_the_same_to_the_digit_resumed_or_not(assets: Path, tmp_path: Path) -> None:
    settings = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 1}
    plain = prepared(assets, tmp_path / "plain", **settings)
    plain.train()
    expected = left(plain)
    run = run_of()
    stressed = prepared(assets, tmp_path / "stressed", run, **settings)
    stressed.train()
    assert equal(left(stressed), expected)
    section = run.facts["stress"]
    assert (section["phase"], section["tokens"], section["evaluation"]["tokens"]) == ("evaluation", 128, 256)
    assert run.facts["gradients"]["problems"] == [] and section["peak_allocated"] is None  # of a CPU
    resumed = prepared(assets, tmp_path / "stressed", run_of(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stressed/checkpoint-1"))
    assert equal(left(resumed), expected)
    over = run_of()
    prepared(assets, tmp_path / "stressed", over, **settings).train(resume_from_checkpoint=True)
    assert "stress" not in over.facts and over.decisions["stress"].choice == "not run"


def test_of_several_evaluation_sets_one_has_enough_rows_for_a_batch(assets: Path, tmp_path: Path) -> None:
    made = prepared(assets, tmp_path, per_device_eval_batch_size=4)
    sets = {"few": made.eval_dataset[:1], "many": made.eval_dataset}
    made.eval_dataset = sets
    found = Stress(run_of(), made, 32)
    assert found.evaluation_set(made) is sets["many"]
    (batch,) = found.batches(made, sets["few"], 4, 1)
    assert batch["input_ids"].shape == (1, 32) and found.rows == 1  # as a shortage says it


def test_its_peak_is_that_of_a_batch_of_full_rows(assets: Path, tmp_path: Path) -> None:
    if reason := unavailable_reason():
        pytest.skip(reason)
    run = run_of()
    prepared(assets, tmp_path / "short", run, cutoff_len=128, use_cpu=False).train()
    rehearsed, short = run.facts["stress"]["peak_allocated"], torch.npu.max_memory_allocated()
    assert rehearsed > 1.5 * short  # the training's own peak is counted anew
    full = prepared(assets, tmp_path / "full", use_cpu=False)
    full.train_dataset = [{name: [*range(20, 148)] for name in ("input_ids", "labels")}] * 8
    gc.collect()
    torch.npu.reset_peak_memory_stats()
    full.train()
    assert torch.npu.max_memory_allocated() == pytest.approx(rehearsed, rel=0.01)


def test_a_signal_ends_it_at_once(assets: Path, tmp_path: Path) -> None:
    made = prepared(assets, tmp_path, run_of())
    made.data_collator = lambda rows: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(signals.Stopped, match="SIGTERM: stopped, there was nothing to save"):
        made.train()
    assert made.state.global_step == 0 and not list(tmp_path.glob("checkpoint-*"))


def test_what_breaks_in_it_is_named(assets: Path, tmp_path: Path) -> None:
    def broken(rows: list[Any]) -> Any:
        raise ValueError(f"no picture in {len(rows)} rows")

    made = prepared(assets, tmp_path, run_of())
    made.data_collator = broken
    with pytest.raises(AscendError, match=r"`ascend.stress` failed on rank 0 .* no picture in 2 rows at "):
        made.train()


def test_the_longest_rows_come_late_and_a_full_size_step_does_not(assets: Path, tmp_path: Path) -> None:
    """Two steps of short rows, then one of full length that does not fit, without and with the step first."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    short, full = ([{name: [*range(20, 20 + n)] for name in ("input_ids", "labels")}] for n in (12, 512))
    settings = {"use_cpu": False, "max_steps": 3, "train_sampling_strategy": "sequential"}
    stock = prepared(assets, tmp_path / "stock", **settings)
    ours = prepared(assets, tmp_path / "ours", run_of(), cutoff_len=512, **settings)
    gc.collect()
    limit = torch.npu.memory_allocated() + 6 * 2**20
    torch.npu.set_per_process_memory_fraction(limit / torch.npu.mem_get_info()[1])
    try:
        for made, error, steps in ((stock, torch.OutOfMemoryError, 2), (ours, AscendError, 0)):
            made.train_dataset = short * 8 + full * 4
            with pytest.raises(error, match="out of memory"):
                made.train()
            assert made.state.global_step == steps
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)


def test_the_command_refuses_what_does_not_fit_before_the_first_step(train: Train) -> None:
    """A device of 12 MiB: rows of 60 tokens would fit, those of 512 that the recipe allows do not."""
    found = train(env={"SIM_NPU_MEMORY_MB": "12"}, cutoff_len=512, ascend={"stress": True})
    (failure,) = found.report["failures"]
    assert (found.code, failure["type"], failure["step"]) == (1, "AscendError", 0)
    assert failure["out_of_memory"] and failure["phase"] in ("forward", "backward", "recompute")
    assert "2 x 512 tokens a micro-batch" in failure["message"] and "of 12,582,912" in failure["message"]
    assert "next: lower `cutoff_len` (a guess: " in found.text
    assert "Traceback" not in found.text


@pytest.fixture(scope="module")
def ranks(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of `worker` on two ranks."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.features.stress.worker", str(assets), str(folder)],
            env={
                **environment(ranks=2),
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    texts = [process.communicate(timeout=240)[0] for process in processes]
    return [json.loads(text.splitlines()[-1]) for text in texts]


def test_two_ranks_of_fsdp2_go_on_as_without_it(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["equal"] is True
        assert found["section"]["phase"] == "evaluation" and found["section"]["peak_allocated"] > 0


def test_where_one_rank_runs_out_of_memory_both_end(ranks: list[dict[str, Any]]) -> None:
    other, short = (found["error"] for found in ranks)
    assert short.startswith("AscendError: rank 1: out of memory in ")
    assert "another rank has gone" in other
