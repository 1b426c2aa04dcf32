"""The adapter is checked when it is saved; a run that ends with a broken one fails."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.adapter import check_adapter
from llamafactory_ascend.features.adapter_proof import AdapterProof
from llamafactory_ascend.report.failure import phase_of
from llamafactory_ascend.run import Run
from llamafactory_ascend.settings import Settings
from tests.running import Train

# A plugin that halves every matrix of the adapter after the last save, before ours looks at it.
DAMAGE = """
from pathlib import Path
from safetensors.torch import load_file, save_file
from llamafactory_ascend import hookimpl

@hookimpl
def ascend_saved(run, trainer):
    file = Path(run.arguments.training.output_dir) / "adapter_model.safetensors"
    save_file({key: value[: len(value) // 2].clone() for key, value in load_file(file).items()}, file)
"""


def install(folder: Path, code: str) -> str:
    """Put a third-party plugin into a folder and return the PYTHONPATH that finds it."""
    metadata = folder / "damage-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: damage\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[llamafactory_ascend]\ndamage = damage_plugin\n")
    (folder / "damage_plugin.py").write_text(code)
    return os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])


def test_a_broken_adapter_fails_the_run(train: Train, tmp_path: Path) -> None:
    env = {"PYTHONPATH": install(tmp_path / "plugin", DAMAGE)}
    result = train(env=env, max_steps=2, save_strategy="steps", save_steps=1)
    assert result.code != 0
    assert f"the adapter in {result.output} is not whole:" in result.text
    assert "lora_A has 4 rows, the rank is 8: 4 of 4 modules" in result.text
    adapter = result.report["ranks"][0]["adapter"]
    assert not adapter["ok"]
    assert {name: entry["ok"] for name, entry in adapter["checkpoints"].items()} == {
        "checkpoint-1": True,
        "checkpoint-2": True,
    }
    (failure,) = result.report["failures"]
    assert (failure["type"], failure["phase"]) == ("AscendError", "saving")
    assert "is not whole: lora_A has 4 rows, the rank is 8" in result.report["explanation"]
    assert "Traceback" not in result.text
    assert check_adapter(result.output / "checkpoint-2").ok


def test_nothing_is_learned_without_a_learning_rate() -> None:
    proof = AdapterProof(Run(), None)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    proof.on_optimizer_step(None, None, None, optimizer=optimizer)
    assert not proof.trained
    optimizer.param_groups[0]["lr"] = 1e-4
    optimizer.step_was_skipped = True  # as accelerate's optimizer says of an overflow in float16
    proof.on_optimizer_step(None, None, None, optimizer=optimizer)
    assert not proof.trained
    optimizer.step_was_skipped = False
    proof.on_optimizer_step(None, None, None, optimizer=optimizer)
    assert proof.trained


@pytest.mark.parametrize("fused", [True, False])
def test_nothing_is_learned_while_gradients_overflow_in_float16(fused: bool) -> None:
    """Accelerate says of no step beside a fused optimizer, the Trainer's default, that it was skipped."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)  # its optimizers want one
    weight = torch.zeros(1, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(torch.optim.AdamW([weight], 1e-2, fused=fused), False, scaler)
    proof = AdapterProof(Run(), None)
    for gradient, learned in ((torch.inf, False), (torch.nan, False), (1.0, True)):
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.tensor([gradient])
        proof.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
        optimizer.step()
        proof.on_optimizer_step(None, None, None, optimizer=optimizer)
        assert proof.trained == learned == bool(weight.any())
        assert optimizer.step_was_skipped == (not learned and not fused)


def test_a_checkpoint_is_checked_after_every_callback_has_written_it(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    run = Run()
    proof = AdapterProof(run, None)
    arguments = SimpleNamespace(should_save=True, output_dir=str(tmp_path))
    proof.on_save(arguments, SimpleNamespace(global_step=7), None)
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0"]))
    model.save_pretrained(tmp_path / "checkpoint-7")  # as the host does for a model with a value head
    proof.on_step_begin(arguments, None, None)
    assert run.facts["adapter"]["checkpoints"]["checkpoint-7"]["ok"]
    assert run.findings == []

    proof.on_save(arguments, SimpleNamespace(global_step=8), None)
    (tmp_path / "checkpoint-8").mkdir()
    proof.on_train_end(arguments, None, None)
    assert not run.facts["adapter"]["checkpoints"]["checkpoint-8"]["ok"]
    assert [finding.level for finding in run.findings] == ["error", "error"]
    assert "no adapter was written" in run.findings[1].message


def test_a_broken_checkpoint_ends_a_strict_run_on_every_rank(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(of_two_ranks, (str(tmp_path),), nprocs=2)
    for rank in (0, 1):
        message = (tmp_path / f"{rank}.txt").read_text()
        assert message.startswith(f"the adapter of {tmp_path}/checkpoint-3 is not whole: ")
        assert "adapter_config.json is missing" in message.splitlines()[0]
        assert "next: resume from the last good checkpoint" in message


def of_two_ranks(rank: int, folder: str) -> None:
    """Rank 0 saves a checkpoint that holds nothing; a relaxed run goes on, a strict one does not."""
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    (Path(folder) / "checkpoint-3").mkdir(exist_ok=True)
    arguments = SimpleNamespace(should_save=rank == 0, output_dir=folder)
    for strict in (False, True):
        proof = AdapterProof(Run(settings=Settings(strict=strict)), None)
        proof.on_step_begin(arguments, None, None)  # nothing was saved: nobody waits for anybody
        proof.on_save(arguments, SimpleNamespace(global_step=3), None)
        try:
            proof.on_step_begin(arguments, None, None)
        except AscendError as error:
            assert strict and phase_of(error) == "saving"
            (Path(folder) / f"{rank}.txt").write_text(str(error))
    torch.distributed.destroy_process_group()
