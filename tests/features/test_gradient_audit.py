"""The audit of the first gradients: what has none is named, and only a real reason excuses it."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.gradient_audit import Gradient, judge, unobservable
from llamafactory_ascend.features.gradient_callback import GradientAudit, MediaWatch, gather
from llamafactory_ascend.run import Arguments, Run
from llamafactory_ascend.settings import Settings
from tests.training import Do, adapted, load, trainer

IMAGES = {"vision": True, "audio": False}
NOTHING = {"vision": False, "audio": False}


def zero(name: str, partner_is_zero: bool = False) -> Gradient:
    return Gradient(name, reached=True, nonzero=False, partner_is_zero=partner_is_zero)


def none(name: str, partner_is_zero: bool = False) -> Gradient:
    return Gradient(name, reached=False, nonzero=False, partner_is_zero=partner_is_zero)


def good(name: str) -> Gradient:
    return Gradient(name, reached=True, nonzero=True, partner_is_zero=False)


@pytest.mark.parametrize(
    ("gradient", "media", "reason"),
    [
        (zero("layers.0.q_proj.lora_A.default.weight", True), NOTHING, "its lora_B is still zero"),
        (zero("embed_tokens.lora_embedding_B.default", True), NOTHING, "its lora_embedding_A is still zero"),
        # a zero lora_B makes a gradient of zero, not none
        (none("layers.0.q_proj.lora_A.default.weight", True), NOTHING, ""),
        (zero("layers.0.q_proj.lora_A.default.weight"), NOTHING, ""),
        (zero("layers.0.q_proj.lora_B.default.weight"), NOTHING, ""),
        (zero("visual.blocks.0.attn.qkv.lora_B.default.weight"), NOTHING, "no image or video"),
        (none("visual.merger.mlp.0.weight"), NOTHING, "no image or video"),
        (zero("visual.blocks.0.attn.qkv.lora_B.default.weight"), IMAGES, ""),
        (zero("audio_tower.layers.0.fc1.weight"), IMAGES, "no sound"),
        (none("layers.0.mlp.experts.3.up_proj.weight"), NOTHING, "no token of the first step was routed"),
        (none("layers.1.mlp.experts.3.up_proj.weight"), NOTHING, ""),  # none of that layer's experts has one
        (zero("v_head.summary.bias"), NOTHING, "a pairwise loss"),
        (zero("v_head.summary.weight"), NOTHING, ""),
    ],
)
def test_only_a_real_reason_excuses(gradient: Gradient, media: dict[str, bool], reason: str) -> None:
    found = judge([gradient, good("layers.0.mlp.experts.0.up_proj.weight")], media)
    if reason:
        ((said, entry),) = found["without_gradient"].items()
        assert said.startswith(reason)
        assert entry == {"tensors": 1, "examples": [gradient.name]}
    assert found["unexplained"] == ([] if reason else [gradient.name])
    assert bool(found["problems"]) == (not reason)
    assert all(problem.endswith(gradient.name) for problem in found["problems"])


def test_the_output_embedding_of_a_reward_model_is_excused_and_no_other() -> None:
    head = none("lm_head.weight")
    assert judge([head, good("v_head.summary.weight")], NOTHING)["problems"] == []
    assert len(judge([head, good("layers.0.mlp.up_proj.weight")], NOTHING)["problems"]) == 1
    assert len(judge([head, zero("v_head.summary.weight")], NOTHING)["problems"]) == 2


def test_counts_are_complete_where_examples_are_capped_and_what_has_no_excuse_is_named() -> None:
    excused = [zero(f"layers.{index}.q_proj.lora_A.default.weight", True) for index in range(30)]
    found = judge([*excused, none("layers.9.lost"), zero("layers.9.dead")], NOTHING)
    assert found["trainable"] == 32
    assert found["without_gradient"] == {
        "its lora_B is still zero, so its gradient is exactly zero": {
            "tensors": 30,
            "examples": [gradient.name for gradient in excused[:5]],
        }
    }
    assert found["unexplained"] == ["layers.9.lost", "layers.9.dead"]
    assert len(judge([none(f"layers.{index}.lost") for index in range(70)], NOTHING)["unexplained"]) == 50
    count, where = "1 of 32 trainable tensors learn nothing", "in the first step, e.g. layers.9"
    assert found["problems"] == [
        f"{count}: backward never reached them {where}.lost",
        f"{count}: all their gradients are zero {where}.dead",
    ]


# What is seen of real tensors.


class Tensors(nn.Module):
    def __init__(self, **gradients: torch.Tensor | None) -> None:
        super().__init__()
        for name, gradient in gradients.items():
            self.register_parameter(name, nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
            getattr(self, name).grad = None if gradient is None else gradient.bfloat16()


def levels(model: nn.Module) -> dict[str, tuple[bool, bool]]:
    gradients, _ = gather(model, MediaWatch(model), torch.device("cpu"))
    return {gradient.name: (gradient.reached, gradient.nonzero) for gradient in gradients}


def test_none_zero_tiny_and_nan_are_told_apart() -> None:
    model = Tensors(
        none=None,
        zero=torch.zeros(3),
        tiny=torch.tensor([0.0, -1e-37, 0.0]),  # its square is 0 in bfloat16 and in float32
        nan=torch.tensor([0.0, float("nan"), 0.0]),
        infinite=torch.tensor([0.0, float("inf"), 0.0]),
    )
    assert levels(model) == {
        "none": (False, False),
        "zero": (True, False),
        "tiny": (True, True),
        "nan": (True, True),
        "infinite": (True, True),
    }


def count_operators(_: int, file: str) -> None:
    """Save what the simulated NPU was asked to do while 3 and 30 gradients were gathered."""
    counts = []
    for number in (3, 30):
        model = Tensors(**{f"t{index}": torch.ones(3) for index in range(number)}).to("npu")
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = operators()
        gather(model, MediaWatch(model), torch.device("npu"))
        counts.append(dict(operators() - before))
    torch.save(counts, file)


def operators() -> Counter[str]:
    lines = torch.ops.simnpu.op_counts().splitlines()
    return Counter({name: int(count) for name, count in (line.rsplit(" ", 1) for line in lines)})


def test_one_transfer_to_the_host_whatever_the_number_of_tensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SIM_NPU_TRACE", "1")  # read once in a process
    torch.multiprocessing.spawn(count_operators, (str(tmp_path / "counts"),), nprocs=1)
    few, many = torch.load(tmp_path / "counts")
    assert (few["aten::linalg_vector_norm"], many["aten::linalg_vector_norm"]) == (3, 30)
    assert (few["copy:d2h"], many["copy:d2h"]) == (1, 1)


def of_two_ranks(rank: int, folder: str) -> None:
    """Rank 0 has a gradient of `a`, rank 1 of `b`, none of `c`; `shard` has one row, which rank 0 holds."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ones = torch.ones(3)
    model = Tensors(a=ones if rank == 0 else ones * 0, b=None if rank == 0 else ones, c=None)
    rows = distribute_tensor(torch.ones(1, 3), dist.init_device_mesh("cpu", (2,)), [Shard(0)])
    model.shard = nn.Parameter(rows)
    model.shard.grad = rows.clone()
    torch.save((levels(model), model.shard.grad.to_local().numel()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_a_gradient_on_any_rank_counts_and_every_rank_knows(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(of_two_ranks, (str(tmp_path),), nprocs=2)
    expected = {"a": (True, True), "b": (True, True), "c": (False, False), "shard": (True, True)}
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)] == [(expected, 3), (expected, 0)]


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (torch.tensor([[1, 1, 1]]), True),
        (torch.tensor([[1, 0, 1]]), False),  # the host's placeholder for a batch without images
        (torch.tensor([[1, 2, 2]]), True),  # packed: the number of the sequence
        (torch.tensor([[[[0.0, -9.0, -9.0], [0.0, 0.0, -9.0], [-9.0, -9.0, 0.0]]]]), True),
        (torch.tensor([[[[0.0, -9.0, -9.0], [-9.0, -9.0, -9.0], [-9.0, -9.0, 0.0]]]]), False),
        (torch.tensor([[[[True, False, False], [True, True, False], [False, False, True]]]]), True),
        (None, True),
    ],
)
def test_an_image_counts_where_it_is_attended_to(mask: torch.Tensor | None, seen: bool) -> None:
    model = nn.Module()
    model.visual = nn.Linear(1, 1)
    model.config = SimpleNamespace(image_token_id=7)
    model.forward = lambda **_: None
    watch = MediaWatch(model)
    inputs = {"attention_mask": mask, "pixel_values": torch.ones(1)}
    model(input_ids=torch.tensor([[5, 5, 5]]), **inputs)
    model(input_ids=torch.tensor([[5, 7, 5]]), **inputs)
    watch.remove()
    model(input_ids=torch.tensor([[7, 7, 7]]), pixel_values=torch.ones(1))  # after the first step
    assert gather(model, watch, torch.device("cpu"))[1] == {"vision": seen, "audio": False}


# In a Trainer.


def detach(model: nn.Module) -> None:
    """Cut layer 2 of 4 out of backward: adapters below it train nothing."""
    model.base_model.model.model.layers[2].register_forward_hook(lambda _, __, output: output.detach())


def silence(model: nn.Module) -> None:
    model.base_model.model.model.layers[3].self_attn.q_proj.lora_B.default.register_forward_hook(
        lambda _, __, output: output * 0
    )


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (detach, "24 of 32 trainable tensors learn nothing: backward never reached them"),
        (silence, "2 of 32 trainable tensors learn nothing: all their gradients are zero"),
    ],
)
def test_adapters_that_learn_nothing_are_named(
    assets: Path, tmp_path: Path, spoil: Callable[[nn.Module], None], problem: str
) -> None:
    run, model = Run(), adapted(assets / "qwen3")
    spoil(model)
    trainer(model, tmp_path, GradientAudit(run), gradient_accumulation_steps=2).train()
    assert run.facts["gradients"]["problems"][0].startswith(problem)
    assert run.findings[0].message.startswith(problem)
    strict = Run(settings=Settings(strict=True))
    with pytest.raises(AscendError, match="trainable tensors learn nothing"):
        trainer(model, tmp_path, GradientAudit(strict)).train()


def test_the_audit_is_made_once_and_leaves_no_hook(assets: Path, tmp_path: Path) -> None:
    run, model = Run(), load(assets / "qwen25vl").train()
    steps: list[dict[str, Any] | None] = []
    note = Do("on_step_end", lambda _: steps.append(run.facts.pop("gradients", None)))
    trainer(model, tmp_path, GradientAudit(run), note, gradient_checkpointing=False).train()
    assert [step is not None for step in steps] == [True, False]
    assert not model._forward_pre_hooks
    # full training on text alone: the whole tower is excused, nothing else needs to be
    assert steps[0] is not None
    assert set(steps[0]["without_gradient"]) == {"no image or video in the first step"}
    assert steps[0]["problems"] == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"deepspeed_plugin": object()}, "DeepSpeed"),
        ({"galore_layerwise": True}, "`galore_layerwise: true`"),
        ({"apollo_layerwise": True}, "`apollo_layerwise: true`"),
    ],
)
def test_the_audit_stays_away_where_gradients_cannot_be_seen(changes: dict[str, Any], reason: str) -> None:
    training = SimpleNamespace(deepspeed_plugin=changes.get("deepspeed_plugin"))
    found = unobservable(Arguments(None, None, training, SimpleNamespace(**changes), None))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
