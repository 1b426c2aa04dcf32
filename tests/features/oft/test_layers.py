"""Shared rotations in whole models: PEFT's exact results, computed once for each state of the weights."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from llamafactory_ascend.features.oft.conventions import left_to_peft
from tests.features.oft.models import config, difference, gradients, logits, loss, with_ours, with_peft
from tests.features.test_checkpointing import image_inputs
from tests.training import IDS


class Solves(TorchDispatchMode):
    """Counts the linear systems that PEFT solves for its exact rotations."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "linalg_solve" in function._schema.name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "checkpointed"), [("qwen2", False), ("qwen2", True), ("qwen25vl", True), ("qwen3_5", True)]
)
def test_losses_and_gradients_are_pefts_exact_ones(assets: Path, name: str, checkpointed: bool) -> None:
    inputs = {"input_ids": IDS, "labels": IDS} if name == "qwen2" else image_inputs(assets / name)
    peft = with_peft(assets / name)
    ours, rotations = with_ours(assets / name, checkpointed=checkpointed)
    for model in (peft, ours):
        loss(model, **inputs).backward()
    assert loss(ours, **inputs).item() == pytest.approx(loss(peft, **inputs).item(), rel=1e-6)
    assert difference(gradients(ours), gradients(peft)) < 1e-5
    assert rotations.computed == 1


def test_a_tower_without_an_image_gets_no_gradient(assets: Path) -> None:
    peft, (ours, _) = with_peft(assets / "qwen25vl"), with_ours(assets / "qwen25vl")
    for model in (peft, ours):
        loss(model).backward()
    assert difference(gradients(ours), gradients(peft)) < 1e-5
    assert sum(gradient is None for gradient in gradients(ours).values()) == 4


def test_once_a_step_for_micro_batches_recomputation_and_evaluation(assets: Path) -> None:
    ours, rotations = with_ours(assets / "qwen2", checkpointed=True)
    peft = with_peft(assets / "qwen2", checkpointed=True)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2) for model in (ours, peft)
    ]
    for step in range(2):
        with Solves() as solves:
            for ids in (IDS, IDS + 7):
                loss(ours, input_ids=ids, labels=ids).backward()
            logits(ours)
            with torch.inference_mode():
                ours(input_ids=IDS)
            loss(ours).backward()
        assert (rotations.computed, solves.count) == (step + 1, 0)
        for ids in (IDS, IDS + 7, IDS):
            loss(peft, input_ids=ids, labels=ids).backward()
        assert difference(gradients(ours), gradients(peft)) < 1e-3  # Adam amplifies rounding of small values
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_the_first_result_of_an_evaluation_serves_training(assets: Path) -> None:
    ours, rotations = with_ours(assets / "qwen2", checkpointed=True)
    with torch.inference_mode():
        ours(input_ids=IDS)
    loss(ours).backward()
    assert rotations.computed == 1
    assert all(gradient is not None for gradient in gradients(ours).values())


def test_an_evaluation_between_forward_and_backward(assets: Path) -> None:
    """What DPO does with its reference; the recomputation must find rotations that are part of a graph."""
    ours, rotations = with_ours(assets / "qwen2", checkpointed=True)
    peft = with_peft(assets / "qwen2")
    value, other = loss(ours), loss(ours, input_ids=IDS + 3, labels=IDS + 3)
    logits(ours)
    with torch.no_grad(), ours.disable_adapter():
        ours(input_ids=IDS)
    (value + other).backward()
    (loss(peft) + loss(peft, input_ids=IDS + 3, labels=IDS + 3)).backward()
    assert difference(gradients(ours), gradients(peft)) < 1e-5
    assert rotations.computed == 1


def test_autocast(assets: Path) -> None:
    ours, _ = with_ours(assets / "qwen2", checkpointed=True)
    peft = with_peft(assets / "qwen2")
    for model in (ours, peft):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(model)
        value.backward()
    assert difference(gradients(ours), gradients(peft)) < 2e-2  # bfloat16 has 8 bits
    exact = with_peft(assets / "qwen2")
    loss(exact).backward()
    assert difference(gradients(ours), gradients(exact)) < 5e-2


def test_a_bfloat16_model_with_float32_weights_of_oft(assets: Path) -> None:
    ours, _ = with_ours(assets / "qwen2")
    expected = logits(ours)
    for parameter in ours.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    found = ours(input_ids=IDS).logits
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.05 * expected.norm()
    found.float().sum().backward()
    assert {gradient.dtype for gradient in gradients(ours).values() if gradient is not None} == {
        torch.float32
    }


def test_generation(assets: Path) -> None:
    ours, rotations = with_ours(assets / "qwen2")
    peft = with_peft(assets / "qwen2")
    tokens = [
        model.eval().generate(input_ids=IDS, max_new_tokens=5, do_sample=False) for model in (ours, peft)
    ]
    assert torch.equal(*tokens)
    assert rotations.computed == 1


def test_adapters_that_are_switched_off_swapped_merged_and_mixed(assets: Path) -> None:
    models: list[PeftModel] = []
    for model in (with_peft(assets / "qwen2"), with_ours(assets / "qwen2")[0]):
        torch.manual_seed(1)
        model.add_adapter("other", config(oft_block_size=8))
        models.append(model.eval())
    peft, ours = models
    first = logits(ours)
    assert torch.allclose(first, logits(peft), atol=1e-5)
    with ours.disable_adapter(), peft.disable_adapter():
        assert torch.equal(logits(ours), logits(peft))
    for names in ("other", ["default", "other"], "default"):
        for model in models:
            model.base_model.set_adapter(names)
        assert torch.allclose(logits(ours), logits(peft), atol=1e-5), names
        assert torch.equal(logits(ours), first) == (names == "default")
    for model in models:
        model.merge_adapter()
    assert torch.allclose(logits(ours), logits(peft), atol=1e-5)
    assert not torch.equal(logits(ours), first)
    assert torch.allclose(logits(ours), first, atol=1e-4)
    ours.unmerge_adapter()
    assert torch.allclose(logits(ours), first, atol=1e-4)


def test_a_layer_that_is_called_by_itself(assets: Path) -> None:
    ours, rotations = with_ours(assets / "qwen2")
    peft = with_peft(assets / "qwen2")
    path = "base_model.model.model.layers.1.self_attn.q_proj"
    x, found = torch.randn(3, 64), []
    for model in (ours, peft):
        layer = model.get_submodule(path)
        found.append(layer(x))
        found[-1].square().sum().backward()
    assert torch.allclose(*found, atol=1e-5)
    assert difference(gradients(ours), gradients(peft)) < 1e-5
    with torch.no_grad():
        ours.get_submodule(path).oft_R["default"].weight.mul_(2)
    assert not torch.allclose(ours.get_submodule(path)(x), found[0], atol=1e-2)
    assert rotations.computed == 2


def test_weights_that_change_past_their_version_counters(assets: Path) -> None:
    """DeepSpeed's optimizers write through `.data`, and then call an optimizer's step."""
    ours, rotations = with_ours(assets / "qwen2")
    before = logits(ours)
    weights = [p for p in ours.parameters() if p.requires_grad]
    for weight in weights:
        weight.data.mul_(2)
        weight.grad = torch.zeros_like(weight)
    torch.optim.SGD(weights, 0.0).step()
    assert not torch.allclose(logits(ours), before, atol=1e-3)
    state = {name: value / 2 for name, value in ours.state_dict().items() if "oft_R" in name}
    ours.load_state_dict(state, strict=False)
    assert torch.allclose(logits(ours), before, atol=1e-6)
    assert rotations.computed == 3


def test_a_copy_has_rotations_of_its_own(assets: Path) -> None:
    ours, rotations = with_ours(assets / "qwen2")
    loss(ours).backward()
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    with ours.disable_adapter():
        assert torch.allclose(logits(twin), logits(ours), atol=1e-6)
    loss(twin).backward()
    assert rotations.computed == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_cayley_neumann": True}, {}),
        ({"block_share": True}, {"`block_share`": 20}),
        ({"coft": True}, {"`coft`": 20}),
    ],
)
def test_what_is_left_to_peft(assets: Path, changes: dict[str, Any], said: dict[str, int]) -> None:
    peft, (ours, rotations) = with_peft(assets / "qwen2", **changes), with_ours(assets / "qwen2", **changes)
    for model in (peft, ours):
        loss(model).backward()
    assert difference(gradients(ours), gradients(peft)) == 0
    assert rotations.computed == 0
    assert left_to_peft(ours) == said


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fsdp2_has_a_unit_for_each_of_its_modules(assets: Path, one_rank: None) -> None:
    """Sharded weights are whole in their own module's forward only, and are refilled in the same tensor."""
    peft, (ours, rotations) = with_peft(assets / "qwen2"), with_ours(assets / "qwen2", checkpointed=True)
    logits(ours)  # before it is sharded
    mesh = init_device_mesh("cpu", (1,))
    for layer in ours.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(ours, mesh=mesh)
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 10.0) for model in (ours, peft)
    ]
    for step in range(2):
        for _ in range(2):
            values = [loss(model) for model in (ours, peft)]
            assert values[0].item() == pytest.approx(values[1].item(), rel=1e-6)
            for value in values:
                value.backward()
        logits(ours)
        whole = {name: grad.full_tensor() for name, grad in gradients(ours).items() if grad is not None}
        assert difference(whole, gradients(peft)) < 1e-4
        assert [unit.computed for unit in rotations.units] == [0, *4 * [step + 1]]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
