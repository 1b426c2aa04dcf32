"""Training through the stock command with `kernels: auto`, on simulated NPUs."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.fake_host import write_plugin
from tests.running import Result, Train, torchrun

AUTO = {"kernels": "auto"}
FSDP2 = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"],
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": True,
    },
}
# of the tiny dense Qwen3.5: three DeltaNet layers and one of attention, a tower of two blocks
MODULES = {
    "gated_delta_rule": ("pytorch", 3),
    "causal_conv1d": ("pytorch", 3),
    "rms_norm_1p": ("torch_npu", 11),
    "rms_norm_gated": ("torch_npu", 3),
    "rope": ("torch_npu", 3),
    "swiglu": ("torch_npu", 4),
}


def attested(result: Result, rank: int = 0) -> dict[str, Any]:
    assert result.code == 0, result.text
    found: dict[str, Any] = result.report["ranks"][rank]["kernels"]["attested"]
    return found


@pytest.fixture(scope="module")
def stock(train_once: Train) -> Result:
    return train_once(ascend={"kernels": "off"})


@pytest.fixture(scope="module")
def one(train_once: Train) -> Result:
    return train_once(ascend=AUTO)


def test_same_training(one: Result, stock: Result) -> None:
    """Losses and gradient norms agree to float32's rounding; the probe of step 1 has changed nothing."""
    assert one.code == stock.code == 0, one.text
    assert one.losses == pytest.approx(stock.losses, rel=2e-6)
    assert one.grad_norms == pytest.approx(stock.grad_norms, rel=2e-5)
    assert one.losses != stock.losses or one.grad_norms != stock.grad_norms


def test_report(one: Result, stock: Result) -> None:
    """Every operator probed once for each class, every module called, every refusal with its reason."""
    section = one.report["ranks"][0]["kernels"]
    assert stock.report["ranks"][0]["kernels"] is None
    probes = {switch["place"]: switch["probe"]["errors"] for switch in section["switches"]}
    assert set(probes) == {
        "Qwen3_5RMSNorm", "Qwen3_5RMSNormGated", "Qwen3_5MLP", "apply_rotary_pos_emb",
        "apply_rotary_pos_emb_vision", "torch_chunk_gated_delta_rule", "causal_conv1d_fn",
    }  # fmt: skip
    assert all("d_0" in errors and max(errors.values()) < 1e-5 for errors in probes.values())
    assert len(probes["torch_chunk_gated_delta_rule"]) == 6  # output and five gradients
    counts = attested(one)
    for operator, (backend, modules) in MODULES.items():
        found = counts[operator]
        assert (found["backends"], found["modules"], found["called"]) == ([backend], modules, modules), (
            operator
        )
        assert found["bypassed"] == found["idle"] == []
    assert set(counts) == set(MODULES)
    assert (
        "flash-linear-attention is not installed" in section["choices"]["gated_delta_rule"]["refused"]["fla"]
    )
    assert "gated_delta_rule pytorch x3" in one.text


@pytest.mark.parametrize("sharding", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_two_ranks(train: Train, sharding: dict[str, Any]) -> None:
    """Adapters everywhere, two micro-batches a step, every layer recomputed: twice the modules, and again."""
    adapters = {"lora_target": "all", "gradient_accumulation_steps": 2, **sharding}
    result = train(ranks=2, command=torchrun(2), ascend=AUTO, max_steps=1, **adapters)
    for rank in (0, 1):
        counts = attested(result, rank)
        for operator in ("gated_delta_rule", "causal_conv1d", "rms_norm_gated", "swiglu"):
            modules = MODULES[operator][1]
            found = counts[operator]
            assert (found["modules"], found["called"]) == (modules, modules), (rank, operator)
            assert (found["calls"], found["recomputed"]) == (2 * modules, 2 * modules), (rank, operator)
    assert result.report["patch_differences"] == []


RANKS = """
import os

from llamafactory_ascend import hookimpl
from llamafactory_ascend.kernels import references
from llamafactory_ascend.kernels.backends import Backend

RANK = int(os.environ.get("RANK", "0"))


def fails_on_one_rank(gate, up):
    if RANK == 1:
        raise RuntimeError("ub overflow")
    return references.swiglu(gate, up)


@hookimpl
def ascend_kernels():
    return [Backend("theirs", "swiglu", f"{__name__}:fails_on_one_rank")]
"""


def test_what_one_rank_gives_up(train: Train, tmp_path: Path) -> None:
    """In an evaluation before the first step: both go on with the next back end, probed and counted."""
    folder = write_plugin(tmp_path / "plugin", "ranks", RANKS)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    evaluation = {"val_size": 2, "eval_on_start": True, "eval_strategy": "steps", "eval_steps": 9}
    start = {"ranks": 2, "command": torchrun(2), "env": {"PYTHONPATH": path}}
    result = train(**start, max_steps=1, **evaluation)
    for rank, entry in enumerate(result.report["ranks"]):
        (switch,) = [one for one in entry["kernels"]["switches"] if one["operator"] == "swiglu"]
        assert switch["backend"] == "torch_npu" and max(switch["probe"]["errors"].values()) < 1e-5
        reason = "its first use failed: RuntimeError: ub overflow"
        assert switch["given_up"] == {"theirs": reason if rank == 1 else f"on rank 1 {reason}"}
        found = attested(result, rank)["swiglu"]
        assert (found["backends"], found["called"]) == (["torch_npu"], 4)


OTHER_DIGITS = """
from llamafactory_ascend import hookimpl
from llamafactory_ascend.kernels import references
from llamafactory_ascend.kernels.backends import Backend


def close(gate, up):
    return references.swiglu(gate, up) * 1.001


@hookimpl
def ascend_kernels():
    return [Backend("close", "swiglu", f"{__name__}:close")]
"""


def test_a_reference_model(train: Train, tmp_path: Path) -> None:
    """DPO of the whole model: equal to the reference before the first step, because both have the kernel."""
    folder = write_plugin(tmp_path / "plugin", "digits", OTHER_DIGITS)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    recipe = {"stage": "dpo", "dataset": "tiny_dpo", "finetuning_type": "full", "max_steps": 2}
    result = train(ascend=AUTO, env={"PYTHONPATH": path}, **recipe)
    counts = attested(result)["swiglu"]
    assert (counts["backends"], counts["modules"], counts["calls"]) == (["close"], 4, 4)
    rewards = [[entry[f"rewards/{side}"] for side in ("chosen", "rejected")] for entry in result.history]
    assert rewards[0] == [0.0, 0.0] and 0.0 not in rewards[1]


def test_packed(train: Train) -> None:
    """The host's own packing with images, on the default attention."""
    result = train(
        ascend=AUTO,
        neat_packing=True,
        dataset="tiny_mm",
        cutoff_len=256,
        per_device_train_batch_size=1,
        max_steps=2,
    )
    counts = attested(result)
    assert result.report["ranks"][0]["kernels"]["packed"] is True
    assert counts["gated_delta_rule"]["called"] == counts["causal_conv1d"]["called"] == 3
    switches = result.report["ranks"][0]["kernels"]["switches"]
    packed = {one["operator"]: one["probe"]["errors"].get("packed output") for one in switches}
    for operator, error in packed.items():
        assert (error is not None and error < 1e-5) is (operator in ("gated_delta_rule", "causal_conv1d"))


def test_a_named_kernel_that_cannot_be_used(train: Train) -> None:
    """The run ends before the weights are loaded, with what is missing."""
    result = train(ascend={"kernels": {"gated_delta_rule": "fla"}})
    assert result.code != 0
    assert "gated_delta_rule: fla cannot be used: flash-linear-attention is not installed" in result.text
    assert "Loading weights" not in result.text
    assert result.report["state"] == "refused"
