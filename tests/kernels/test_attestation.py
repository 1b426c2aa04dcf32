"""Counting: forward and recomputation apart, gradient accumulation, what was bypassed, and no trace."""

import copy
import gc
from typing import Any

import pytest
import torch

from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.kernels_proof import judge
from llamafactory_ascend.kernels.attestation import Attestation
from llamafactory_ascend.kernels.substitution import Substitutions
from tests.kernels import tiny

IDS = torch.randint(0, 60, (1, 70), generator=torch.Generator().manual_seed(1))
RULE = {"gated_delta_rule": "pytorch", "causal_conv1d": "pytorch"}


@pytest.fixture
def hybrid() -> Any:
    """A hybrid with our rule in its three DeltaNet layers, and what was substituted."""
    of, model = tiny.family("qwen3_5"), tiny.build("qwen3_5_text")
    done, _ = tiny.put(model, of, tiny.choose(of, RULE))
    yield model.train(), done
    done.revert()


def count(model: Any, done: Substitutions, batches: int = 1) -> dict[str, dict[str, Any]]:
    attestation = Attestation(done.slots)
    attestation.start()
    for _ in range(batches):
        model(input_ids=IDS, use_cache=False).logits.sum().backward()
    attestation.stop()
    return attestation.result()


def test_plain(hybrid: Any) -> None:
    for operator, counts in count(*hybrid).items():
        assert operator in RULE
        expected = {"backends": ["pytorch"], "modules": 3, "called": 3, "calls": 3, "recomputed": 0}
        assert counts == {**expected, "bypassed": [], "idle": []}
        assert judge(counts) == []


def test_checkpointing_and_accumulation(hybrid: Any) -> None:
    """Two micro-batches, every layer run again by backward, in a thread of its own."""
    model, done = hybrid
    checkpointing.enable(model)
    counts = count(model, done, batches=2)["gated_delta_rule"]
    assert (counts["called"], counts["calls"], counts["recomputed"]) == (3, 6, 6)


def test_a_layer_without_its_kernel(hybrid: Any) -> None:
    """It ran, but past its switch."""
    model, done = hybrid
    switch = next(s for s in done.switches.values() if s.operator == "gated_delta_rule")
    layer = model.model.layers[1].linear_attn
    layer.chunk_gated_delta_rule = switch.original
    counts = count(model, done)["gated_delta_rule"]
    assert (counts["called"], counts["bypassed"]) == (2, ["model.layers.1.linear_attn"])
    assert judge(counts) == [
        "1 modules ran without the kernel put into them, e.g. model.layers.1.linear_attn"
    ]


def test_a_layer_that_never_ran(hybrid: Any) -> None:
    model, done = hybrid
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = 2
    counts = count(model, done)["gated_delta_rule"]
    assert counts["idle"] == ["model.layers.2.linear_attn"]
    assert judge(counts) == ["1 of 3 modules were never called, e.g. model.layers.2.linear_attn"]


def test_a_layer_that_another_has_replaced(hybrid: Any) -> None:
    """What was substituted is gone from the model, and what stands there runs without the kernel."""
    model, done = hybrid
    layer = model.model.layers[1].linear_attn
    model.model.layers[1].linear_attn = copy.deepcopy(layer)
    del layer
    gc.collect()
    counts = count(model, done)["gated_delta_rule"]
    assert (counts["modules"], counts["called"], counts["idle"]) == (3, 2, ["model.layers.1.linear_attn"])


def test_an_idle_tower_is_no_problem() -> None:
    assert judge({"modules": 2, "bypassed": [], "idle": ["model.visual.blocks.0.attn"]}) == []


def test_nothing_is_left_behind(hybrid: Any) -> None:
    model, done = hybrid
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    count(model, done)
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert all(switch.counting is None for switch in done.switches.values())
