"""A step without weights against the same step on the simulated NPU, and the published size."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.memory import fakes
from llamafactory_ascend.memory.fsdp2 import FullyShard, Policy, share
from llamafactory_ascend.memory.ledger import OPTIMIZER, WEIGHTS, Ledger, block_size, requested
from llamafactory_ascend.memory.step import Plan, measure
from tests import geometry
from tests.conftest import SIMULATOR_MISSING
from tests.training import ATTENTION

IDS = torch.arange(96).reshape(2, 48) % 600
BATCH = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
RANKS = 8


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def without_weights(folder: Path) -> PeftModel:
    """LoRA on a tiny model, checkpointed, on the meta device."""
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        checkpointing.enable(model)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=ATTENTION, lora_dropout=0.1)).train()
    checkpointing.remove_input_grad_hooks(adapted)
    return adapted


def on_the_simulated_npu(model: torch.nn.Module) -> dict[str, int]:
    """Return the peaks of forward and of the rest of a second step, in requested bytes."""
    model.to_empty(device="npu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    batch = {name: value.to("npu") for name, value in BATCH.items()}
    optimizer = adamw([x for x in model.parameters() if x.requires_grad])
    memory = torch.npu  # type: ignore[attr-defined]
    found = {}
    start = 0
    for _ in range(2):
        found.clear()
        memory.reset_peak_memory_stats()
        with torch.autocast("npu", torch.bfloat16):
            loss = model(**batch).loss
        found["forward"] = memory.memory_stats()["requested_bytes.all.peak"] - start
        memory.reset_peak_memory_stats()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["backward"] = memory.memory_stats()["requested_bytes.all.peak"] - start
    return found


@pytest.mark.skipif(bool(SIMULATOR_MISSING), reason=str(SIMULATOR_MISSING))
def test_peaks_are_those_of_the_simulated_npu(assets: Path) -> None:
    plan = Plan(BATCH, adamw, autocast=torch.bfloat16)
    model = without_weights(assets / "qwen3b")
    shapes = {name: (x.shape, x.device.type) for name, x in model.named_parameters()}
    phases = measure(model, plan)
    assert {name: (x.shape, x.device.type) for name, x in model.named_parameters()} == shapes
    before = torch.npu.memory_stats()["requested_bytes.all.current"]  # type: ignore[attr-defined]
    measured = {name: peak - before for name, peak in on_the_simulated_npu(model).items()}
    assert requested(phases["forward"]) == pytest.approx(measured["forward"], abs=1024)
    later = max(requested(phases[name]) for name in ("backward", "recompute", "optimizer"))
    assert later == pytest.approx(measured["backward"], rel=0.03)  # SiLU's backward is in parts there


@pytest.fixture(scope="module")
def published() -> PeftModel:
    """The 27B hybrid with LoRA on its attention, in bfloat16 on the meta device."""
    model = geometry.build("Qwen/Qwen3.8-27B")
    with torch.device("meta"):
        return get_peft_model(model, LoraConfig(r=8, target_modules=ATTENTION))


def load(model: Any, frozen: torch.dtype | None, whole: int = 0) -> tuple[FullyShard, Ledger]:
    policy = Policy(
        {"Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"},
        stored=torch.float32,
        frozen=frozen,
        computed=torch.bfloat16,
        whole=whole,
    )
    mode, book = fakes.new_mode(), Ledger()
    with fakes.without_storage(model, mode, torch.bfloat16), mode, book:
        sharding = FullyShard(model, book, RANKS, policy)
        sharding.load()
    return sharding, book


def test_shares_of_the_published_size(published: PeftModel) -> None:
    trained = [x for x in published.parameters() if x.requires_grad]
    assert (len(trained), sum(x.numel() for x in trained)) == (128, 5_242_880)
    numbers = sum(share(parameter, RANKS) for parameter in published.parameters())
    assert 27_361_971_440 / RANKS <= numbers < 27_361_971_440 / RANKS * 1.0001
    sharding, book = load(published, torch.float32)
    assert book.held[WEIGHTS] == 4 * numbers
    assert len(sharding.all_groups) == 92  # 64 layers, 27 blocks, the root
    assert sum(x.numel() for x in sharding.trained()) == 5_242_880 // RANKS


def test_frozen_shares_keep_the_dtype_they_are_loaded_in(published: PeftModel) -> None:
    _, book = load(published, torch.bfloat16)
    frozen, trained = (
        sum(share(x, RANKS) for x in published.parameters() if x.requires_grad is kind)
        for kind in (False, True)
    )
    assert book.held[WEIGHTS] == 2 * frozen + 4 * trained


def test_a_model_that_is_loaded_onto_each_card_is_there_beside_the_shares(published: PeftModel) -> None:
    _, book = load(published, torch.float32, whole=51 << 30)
    assert requested(book.peaks.found["load"]) > (51 << 30) + book.held[WEIGHTS]


def test_the_allocator_rounds_up() -> None:
    assert [block_size(size) for size in (0, 1, 480, 481)] == [0, 512, 512, 1024]


def test_optimizer_states_are_two_numbers_for_each_that_is_trained(assets: Path) -> None:
    model = without_weights(assets / "qwen3")
    phases = measure(model, Plan(BATCH, adamw, autocast=torch.bfloat16, accumulation=2))
    trained = [x for x in model.parameters() if x.requires_grad]
    states = sum(2 * x.numel() * x.itemsize + 4 for x in trained)  # and a count of steps
    assert phases["forward"][OPTIMIZER] == states
    assert "evaluation" not in phases
