"""Stock LLaMA-Factory in processes of its own, on the simulated NPU: layers and gradients in the report."""

from typing import Any

import pytest

from tests.running import Result, Train, torchrun

LORA_A = "its lora_B is still zero, so its gradient is exactly zero"
NO_IMAGE = "no image or video in the first step"
BIAS = "a pairwise loss is a difference of two values, in which a common bias cancels"
VISION_LORA = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False, "lora_target": "all"}
QWEN25VL = {"model": "qwen25vl", "template": "qwen2_vl"}
# name: recipe, (vision, text) layers checkpointed, trainable tensors, those without a gradient by reason
RUNS: dict[str, tuple[dict[str, Any], tuple[int, int], int, dict[str, int]]] = {
    "pt": ({"stage": "pt", "dataset": "tiny_pt"}, (0, 1), 8, {LORA_A: 4}),
    "dpo": ({"stage": "dpo", "dataset": "tiny_dpo"}, (0, 1), 8, {LORA_A: 4}),
    # 0.9.5 itself cannot run KTO on a model with a vision tower: it drops mm_token_type_ids
    "kto": (
        {"stage": "kto", "dataset": "tiny_kto", "model": "qwen3", "template": "qwen3"},
        (0, 4),
        32,
        {LORA_A: 16},
    ),
    "rm": ({"stage": "rm", "dataset": "tiny_dpo"}, (0, 1), 10, {LORA_A: 4, BIAS: 1}),
    "full": ({"finetuning_type": "full"}, (0, 4), 56, {}),
    "freeze": ({"finetuning_type": "freeze", "freeze_trainable_layers": 2}, (0, 2), 25, {}),
    "embeddings": ({"additional_target": "embed_tokens", "lora_target": "o_proj"}, (0, 4), 3, {LORA_A: 1}),
    "images": ({**QWEN25VL, "dataset": "tiny_mm"}, (0, 4), 32, {LORA_A: 16}),
    "vision adapters": ({**QWEN25VL, **VISION_LORA, "dataset": "tiny_mm"}, (2, 4), 76, {LORA_A: 38}),
    "vision adapters without images": ({**QWEN25VL, **VISION_LORA}, (2, 4), 76, {LORA_A: 38, NO_IMAGE: 10}),
}


def assert_proven(result: Result, layers: tuple[int, int], trainable: int, without: dict[str, int]) -> None:
    assert result.code == 0, result.text[-4000:]
    for rank in result.report["ranks"]:
        counts, audit = rank["checkpointing"], rank["gradients"]
        assert (counts["problems"], audit["problems"]) == ([], [])
        found = tuple(counts["checkpointed"].get(component, 0) for component in ("vision", "text"))
        assert (
            found == tuple(counts["expected"].get(component, 0) for component in ("vision", "text")) == layers
        )
        idle = {reason: entry["tensors"] for reason, entry in audit["without_gradient"].items()}
        assert (audit["trainable"], audit["unexplained"], idle) == (trainable, [], without)


@pytest.mark.parametrize("name", RUNS)
def test_every_stage_and_method_is_checkpointed_as_planned(train: Train, name: str) -> None:
    recipe, *expected = RUNS[name]
    assert_proven(
        train(max_steps=1, gradient_checkpointing=True, ascend={"strict": True}, **recipe), *expected
    )


SHARDED = {"transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"]}
FSDP_RUNS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp1": {"fsdp": "full_shard auto_wrap", "fsdp_config": SHARDED},
    "fsdp2": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {**SHARDED, "version": 2, "reshard_after_forward": True},
    },
}


@pytest.mark.parametrize("name", FSDP_RUNS)
def test_two_ranks_are_checkpointed_as_planned(train: Train, name: str) -> None:
    start = {"ranks": 2, "command": torchrun(2)}
    result = train(**start, max_steps=1, gradient_checkpointing=True, **FSDP_RUNS[name])
    assert_proven(result, (0, 1), 8, {LORA_A: 4})
    assert [rank["rank"] for rank in result.report["ranks"]] == [0, 1]


def test_disabled_checkpointing_stays_disabled(train: Train) -> None:
    result = train(max_steps=1, disable_gradient_checkpointing=True)
    assert result.code == 0, result.text[-4000:]
    assert [rank["checkpointing"] for rank in result.report["ranks"]] == [None]
    assert result.report["decisions"]["checkpointing"]["choice"] == "none"


def test_double_checkpointing_ends_the_command_before_the_model_is_loaded(train: Train) -> None:
    config = {**SHARDED, "version": 2, "activation_checkpointing": True}
    result = train(fsdp="full_shard auto_wrap", fsdp_config=config)
    assert result.code != 0
    assert "activations would be recomputed twice" in result.text
    assert "Loading weights" not in result.text
    assert "remove that line" in result.text


def test_stock_misses_layers_that_the_plan_counts(train_once: Train) -> None:
    """Of the hybrid's eight layers stock checkpoints the two that own an adapter; backward passes five."""
    changes = {"model": "qwen3_5_8l", "gradient_checkpointing": True, "max_steps": 1}
    changes["ascend"] = {"kernels": "off"}  # so that every digit is stock's
    stock, ours = (train_once(plugin=plugin, **changes) for plugin in (False, True))
    assert ours.report["ranks"][0]["checkpointing"]["checkpointed"] == {"text": 5}
    assert ours.losses == stock.losses
    assert ours.grad_norms == stock.grad_norms
    assert ours.peak() < 0.9 * stock.peak()


def test_inputs_on_the_host_change_nothing_where_copies_are_late_and_fresh_memory_is_nan(
    train_once: Train,
) -> None:
    changes = {"model": "qwen3", "template": "qwen3", "max_steps": 2, "cutoff_len": 512, "dataset": "long"}
    full = train_once(ascend={"kernels": "off"}, **changes)
    env = {"SIM_NPU_ASYNC": "1", "SIM_NPU_POISON": "1"}
    moved = train_once(ascend={"kernels": "off", "checkpointing": "offload"}, env=env, **changes)
    assert moved.code == 0, moved.text[-4000:]
    assert (moved.losses, moved.grad_norms) == (full.losses, full.grad_norms)
    (counts,) = [rank["checkpointing"] for rank in moved.report["ranks"]]
    assert (counts["checkpointed"], counts["problems"]) == ({"text": 4}, [])
    hidden = 2 * 512 * 64 * 4  # bytes of a micro-batch between two layers
    assert full.peak() - moved.peak() == 4 * hidden  # at the loss all are on the host
