"""The data loader on an NPU: pinned memory, workers, and the order of rows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llamafactory_ascend.features import data_loading
from llamafactory_ascend.features.data_loading import batches_per_epoch, cap, cores
from llamafactory_ascend.run import Arguments, Run
from tests.sim_npu.available import unavailable_reason
from tests.training import load


def arguments(device: str = "npu", streaming: bool = False, **training: Any) -> Arguments:
    data = SimpleNamespace(streaming=streaming, preprocessing_num_workers=training.pop("preprocessing", None))
    settings = {"dataloader_pin_memory": True, "dataloader_num_workers": 0, **training}
    return Arguments(None, data, SimpleNamespace(device=torch.device(device), **settings), None, None)


def test_pinned_memory_is_off_unless_the_user_says_otherwise() -> None:
    run, found = Run(), arguments()
    data_loading.ascend_arguments(run, found)
    assert found.training.dataloader_pin_memory is False
    assert run.decisions["dataloader_pin_memory"].choice == "false"
    assert data_loading.ascend_preflight(run, found) == []


@pytest.mark.parametrize("value", [True, False])
def test_a_users_own_value_stays_and_true_is_warned_about(value: bool) -> None:
    run = Run(given=frozenset({"dataloader_pin_memory"}))
    found = arguments(dataloader_pin_memory=value)
    data_loading.ascend_arguments(run, found)
    assert found.training.dataloader_pin_memory is value
    assert run.decisions["dataloader_pin_memory"].choice == str(value).lower()
    assert [finding.level for finding in data_loading.ascend_preflight(run, found)] == ["warning"] * value


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_devices_are_left_alone(device: str) -> None:
    run, found = Run(), arguments(device, dataloader_num_workers=512, preprocessing=512)
    data_loading.ascend_arguments(run, found)
    assert data_loading.ascend_preflight(run, found) == [] and run.decisions == {}
    assert found.training.dataloader_pin_memory is True
    assert (found.training.dataloader_num_workers, found.data.preprocessing_num_workers) == (512, 512)


def test_workers_are_limited_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run, found = Run(), arguments(dataloader_num_workers=512, preprocessing=512)
    data_loading.ascend_arguments(run, found)
    assert found.training.dataloader_num_workers == max(1, cores() // 2)
    assert found.data.preprocessing_num_workers == cores()
    decision = run.decisions["dataloader_num_workers"]
    assert decision.choice == str(found.training.dataloader_num_workers)
    assert decision.reason.startswith(f"512 asked for; 2 ranks share {cores()} cores")
    stream = arguments(
        streaming=True, dataloader_num_workers=512
    )  # one shard for each: the order depends on it
    data_loading.ascend_arguments(run, stream)
    assert stream.training.dataloader_num_workers == 512


@pytest.mark.parametrize(
    ("workers", "cores", "ranks", "batches", "useful"),
    [
        (4, 64, 8, None, 4),
        (16, 64, 8, None, 8),
        (4, 2, 8, None, 1),
        (8, 64, 1, 3, 3),
        (8, 64, 1, 0, 1),
        (0, 8, 1, 9, 0),
    ],
)
def test_cap(workers: int, cores: int, ranks: int, batches: int | None, useful: int) -> None:
    assert cap(workers, cores, ranks, batches) == useful


def test_workers_are_limited_to_the_batches() -> None:
    assert batches_per_epoch(rows=17, batch_size=2, ranks=4) == 3
    training = arguments(dataloader_num_workers=8, per_device_train_batch_size=2, world_size=4).training
    run = Run()
    data_loading.ascend_trainer_callbacks(run, SimpleNamespace(args=training, train_dataset=range(17)))  # type: ignore[arg-type]
    assert training.dataloader_num_workers == 3
    assert run.decisions["dataloader_num_workers"].reason == (
        "8 asked for; 17 rows are 3 batches for each of 4 ranks"
    )


def test_one_seed_gives_one_order_of_rows_on_every_device(assets: Path, tmp_path: Path) -> None:
    """The rows are shuffled by a generator on the CPU, whatever the device and its own random stream."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    from transformers import Trainer, TrainingArguments, set_seed

    def order(use_cpu: bool, seed: int) -> list[int]:
        settings = TrainingArguments(
            str(tmp_path),
            use_cpu=use_cpu,
            seed=seed,
            report_to="none",
            per_device_train_batch_size=2,
            dataloader_pin_memory=False,
        )
        set_seed(seed)
        rows = [{"input_ids": [row], "labels": [row]} for row in range(40)]
        trainer = Trainer(load(assets / "qwen3"), settings, train_dataset=rows)
        assert settings.device.type == ("cpu" if use_cpu else "npu")
        torch.rand(7, device=settings.device)  # what initialisation draws
        epochs = [batch["input_ids"].cpu() for _ in range(2) for batch in trainer.get_train_dataloader()]
        return torch.cat(epochs).flatten().tolist()

    cpu, npu = order(use_cpu=True, seed=3), order(use_cpu=False, seed=3)
    assert cpu == npu
    assert sorted(cpu[:40]) == list(range(40)) != cpu[:40]
    assert order(use_cpu=False, seed=4) != npu
