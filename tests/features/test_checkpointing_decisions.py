"""What the user asked for is respected: who checkpoints, what contradicts that, what stays the host's."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from llamafactory_ascend import run as run_module
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.checkpointing_conflicts import double_checkpointing
from llamafactory_ascend.run import Arguments, Run
from llamafactory_ascend.settings import Settings
from tests.training import load


def arguments(**changes: Any) -> Arguments:
    """The attributes of the host's arguments that this feature reads."""
    model = {"disable_gradient_checkpointing": False, "use_unsloth_gc": False, "use_unsloth": False}
    training = {
        "do_train": True,
        "fsdp": [],
        "fsdp_config": {},
        "gradient_checkpointing": False,
        "gradient_checkpointing_kwargs": None,
    }
    training |= {"torch_compile": False, "device": torch.device("npu")}
    finetuning = {"stage": "sft", "use_badam": False}
    parts = [
        SimpleNamespace(**{key: changes.get(key, value) for key, value in part.items()})
        for part in (model, training, finetuning)
    ]
    return Arguments(parts[0], None, parts[1], parts[2], None)


def decide(settings: Settings | None = None, **changes: Any) -> str:
    run = Run(settings=settings or Settings())
    checkpointing.ascend_arguments(run, arguments(**changes))
    return run.decisions["checkpointing"].choice


def test_decisions_follow_the_users_settings() -> None:
    assert decide() == checkpointing.OURS
    assert decide(Settings(checkpointing="off")) == "left to the host"
    assert decide(use_unsloth_gc=True) == "left to the host"
    assert decide(disable_gradient_checkpointing=True) == "none"
    assert decide(disable_gradient_checkpointing=True, gradient_checkpointing=True).startswith(
        "left to the Trainer"
    )
    assert decide(Settings(strict=True), disable_gradient_checkpointing=True) == "none"


@pytest.mark.parametrize("mode", ["full", "auto", "offload"])
def test_a_request_that_another_line_takes_back_is_refused_with_both_named(mode: Any) -> None:
    message = f"`disable_gradient_checkpointing: true` contradicts `ascend.checkpointing: {mode}`"
    with pytest.raises(AscendError, match=message):
        decide(Settings(checkpointing=mode), disable_gradient_checkpointing=True)


CPU = {"device": torch.device("cpu")}


@pytest.mark.parametrize(
    ("mode", "changes", "reason"),
    [
        ("auto", {"use_unsloth": True}, "Unsloth brings its own checkpointing"),
        ("offload", {"use_unsloth_gc": True}, "Unsloth brings its own checkpointing"),
        ("auto", {"torch_compile": True}, "`torch_compile: true` fixes at the first step"),
        ("offload", {"torch_compile": True}, "`torch_compile: true` fixes at the first step"),
        ("auto", {"stage": "ppo"}, "`stage: ppo` has a loop of its own"),
        ("auto", {"use_badam": True}, "BAdam trains one block after the other"),
        ("auto", CPU, "this run is on a CPU, so there is no device memory to fit into"),
        ("offload", CPU, "this run is on a CPU, so there is no device memory to relieve"),
    ],
)
def test_what_auto_and_offload_cannot_do_is_refused(mode: Any, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(AscendError) as error:
        decide(Settings(checkpointing=mode), **changes)
    assert error.value.what.startswith(f"`ascend.checkpointing: {mode}`: {reason}")
    assert error.value.hint == "write `ascend.checkpointing: full`"
    assert decide(Settings(checkpointing=mode)) == checkpointing.OURS


@pytest.mark.parametrize("mode", ["full", "offload", "off"])
def test_a_budget_that_nothing_keeps_to_is_refused(mode: Any) -> None:
    with pytest.raises(AscendError, match=f"means nothing with `ascend.checkpointing: {mode}`"):
        decide(Settings(checkpointing=mode, memory_budget=0.5))


def test_a_model_that_cannot_be_checkpointed_is_refused_where_it_must_be() -> None:
    run = Run(settings=Settings(checkpointing="auto"), arguments=arguments())
    run.decide("checkpointing", "left to the host", "OldFormat has the old format")
    with pytest.raises(AscendError, match=r"`ascend.checkpointing: auto`: it is left to the host: OldFormat"):
        checkpointing.ascend_trainer_callbacks(run, SimpleNamespace())


class Zero3:
    def is_zero3(self) -> bool:
        return True


@pytest.fixture
def zero3() -> Iterator[None]:
    """What Transformers notes while training arguments with ZeRO-3 are alive."""
    from transformers.integrations import deepspeed

    config = Zero3()  # held here: Transformers keeps a weak reference
    deepspeed.set_hf_deepspeed_config(config)
    yield
    deepspeed.unset_hf_deepspeed_config()


def test_zero_3_is_left_to_the_host_and_refused_where_checkpointing_was_asked_for(zero3: None) -> None:
    assert decide() == "left to the host"
    assert decide(Settings(checkpointing="off")) == "left to the host"
    asked = [Settings(checkpointing=mode) for mode in ("full", "auto", "offload")]
    for settings in (*asked, Settings(strict=True)):
        with pytest.raises(AscendError, match="ZeRO-3 cannot be checkpointed without re-entrance"):
            decide(settings)


class Product(torch.autograd.Function):
    """A matrix product that hands its operands to autograd itself, as DeepSpeed's does."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.saved_tensors[1].T, None


class Emptied(nn.Module):
    """A layer with a frozen weight that is there only while its forward runs, as ZeRO-3 keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.ones(4, 4)
        hidden = Product.apply(hidden, self.weight)
        self.weight.data = torch.empty(0)
        return hidden.exp()


def test_frozen_parameters_that_come_and_go_break_a_recomputation_without_reentrance() -> None:
    hidden = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
        checkpointing.LayerCheckpointing()(Emptied().__call__, hidden).sum().backward()


def test_an_explicit_reentrance_is_noted() -> None:
    run = Run()
    checkpointing.ascend_arguments(run, arguments(gradient_checkpointing_kwargs={"use_reentrant": True}))
    assert run.findings[0].message == "`gradient_checkpointing_kwargs.use_reentrant: true` is not heeded"


FSDP = {"ACCELERATE_USE_FSDP": "true"}


@pytest.mark.parametrize(
    ("config", "fsdp", "env", "line"),
    [
        ({"activation_checkpointing": True}, "full_shard", {}, "fsdp_config: activation_checkpointing"),
        ({"fsdp_activation_checkpointing": True}, "full_shard", {}, "fsdp_activation_checkpointing): true"),
        ({}, "full_shard", {"FSDP_ACTIVATION_CHECKPOINTING": "1"}, "FSDP_ACTIVATION_CHECKPOINTING=1"),
        ({}, "", {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "FSDP_ACTIVATION_CHECKPOINTING=true"),
        ({"activation_checkpointing": True}, "", FSDP, "fsdp_config: activation_checkpointing"),
        # the recipe's word counts before the environment's
        ({"activation_checkpointing": False}, "full_shard", {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, ""),
        ({"activation_checkpointing": True}, "", {}, ""),
        ({}, "", {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, ""),
        ({}, "full_shard", FSDP, ""),
    ],
)
def test_double_checkpointing_is_refused_by_the_line_that_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: dict[str, Any],
    fsdp: str,
    env: dict[str, str],
    line: str,
) -> None:
    training = TrainingArguments(output_dir=str(tmp_path), fsdp=fsdp, fsdp_config=config, use_cpu=True)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = double_checkpointing(arguments(fsdp=training.fsdp, fsdp_config=training.fsdp_config))
    assert line in found
    assert bool(line) == bool(found)
    if line:
        with pytest.raises(AscendError, match="remove that line") as error:
            decide(fsdp=training.fsdp, fsdp_config=training.fsdp_config)
        assert line in error.value.what


class OldFormat(nn.Module):
    """A model of before Transformers 4.35."""

    supports_gradient_checkpointing = True

    def _set_gradient_checkpointing(self, module: nn.Module, value: bool = False) -> None:
        module.gradient_checkpointing = value


class Host:
    """Stands where the host's function was, and remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


@pytest.mark.parametrize("case", ["old format", "unsloth", "off", "zero3", "ours"])
def test_the_host_keeps_what_is_not_ours(
    assets: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, case: str
) -> None:
    from llamafactory_ascend.host.checkpointing import gradient_checkpointing_enable

    now = Run(settings=Settings(checkpointing="off" if case == "off" else "full"))
    monkeypatch.setattr(run_module, "current", lambda: now)
    model = OldFormat() if case == "old format" else load(assets / "qwen3")
    host, kwargs = Host(), {"use_reentrant": True}
    if case == "zero3":
        request.getfixturevalue("zero3")
    enable = MethodType(partial(gradient_checkpointing_enable, host), model)
    enable(gradient_checkpointing_kwargs=kwargs, use_unsloth_gc=case == "unsloth")
    assert host.calls == ([] if case == "ours" else [(model, kwargs, case == "unsloth")])
    assert (checkpointing.installed(model) is not None) == (case == "ours")
    if case == "old format":
        assert now.decisions["checkpointing"].reason == "OldFormat has the old format"
