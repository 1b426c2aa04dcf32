"""Checkpointing: what it saves, that it computes the same, and that what the user asked for is respected."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from llamafactory_ascend import run as run_module
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.checkpointing_conflicts import double_checkpointing
from llamafactory_ascend.run import Arguments, Run
from llamafactory_ascend.settings import Settings
from tests.training import ATTENTION, IDS, adapted, gradients, load


def assert_equal_gradients(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert any(gradient is not None and gradient.any() for gradient in one.values())
    for name, gradient in one.items():
        assert torch.equal(gradient, other[name]), name


@contextmanager
def saved_within(module: nn.Module) -> Iterator[list[int]]:
    """Bytes of every tensor that autograd saves while the module's forward runs."""
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    handles = [
        module.register_forward_pre_hook(lambda *_: hooks.__enter__()),
        module.register_forward_hook(lambda *_: hooks.__exit__()),
    ]
    yield sizes
    for handle in handles:
        handle.remove()


def image_inputs(folder: Path) -> dict[str, Any]:
    processor = transformers.AutoProcessor.from_pretrained(folder)
    text = "<|vision_start|><|image_pad|><|vision_end|> the lazy dog"
    inputs = processor(text=[text], images=[torch.zeros(3, 56, 56, dtype=torch.uint8)], return_tensors="pt")
    return {**inputs, "labels": inputs["input_ids"]}


# What a step saves and computes.


def test_a_frozen_tower_saves_nothing_where_stock_saves_a_graph(assets: Path) -> None:
    from llamafactory.model.model_utils import checkpointing as host

    inputs = image_inputs(assets / "qwen25vl")
    stock = load(assets / "qwen25vl")
    unwrap(host._gradient_checkpointing_enable)(stock)  # what the host does before and PEFT after
    stock = get_peft_model(stock, LoraConfig(target_modules=ATTENTION)).train()
    with saved_within(stock.base_model.model.model.visual) as stock_sizes:
        stock(**inputs).loss.backward()
    ours = adapted(assets / "qwen25vl")
    with saved_within(ours.base_model.model.model.visual) as our_sizes:
        ours(**inputs).loss.backward()
    assert sum(stock_sizes) > 100_000
    assert sum(our_sizes) == 0


def test_layers_below_the_first_adapter_save_nothing(assets: Path) -> None:
    model = adapted(assets / "qwen3_5")
    sizes = []
    for layer in model.base_model.model.model.language_model.layers:
        with saved_within(layer) as saved:
            model(input_ids=IDS, labels=IDS).loss.backward()
        sizes.append(sum(saved))
    assert sizes[:3] == [0, 0, 0]
    assert sizes[3] > 0


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_8l", "qwen25vl"])
def test_gradients_are_those_without_checkpointing_and_every_layer_counts(assets: Path, name: str) -> None:
    plain, ours = adapted(assets / name, enable=False), adapted(assets / name)
    function = checkpointing.installed(ours)
    assert function is not None
    function.start_counting()
    assert_equal_gradients(gradients(plain), gradients(ours))
    assert sum(function.forward.values()) == {"qwen3_5": 1, "qwen3_5_8l": 5, "qwen25vl": 4}[name]
    assert function.recomputed == function.forward


def test_adapters_in_the_tower_train_through_checkpoints(assets: Path) -> None:
    inputs = image_inputs(assets / "qwen25vl")
    targets = [*ATTENTION, "qkv"]
    plain, ours = adapted(assets / "qwen25vl", targets, enable=False), adapted(assets / "qwen25vl", targets)
    function = checkpointing.installed(ours)
    assert function is not None
    function.start_counting()
    assert_equal_gradients(gradients(plain, **inputs), gradients(ours, **inputs))
    assert len(function.recomputed) == 2 + 4


def test_router_losses_of_a_mixture_of_experts_keep_their_gradient(assets: Path) -> None:
    inputs = {"input_ids": IDS, "labels": IDS, "output_router_logits": True}
    found = []
    for enable in (False, True):
        model = load(assets / "qwen3_5_moe").train()
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("mlp.gate.weight"))
        if enable:
            checkpointing.enable(model)
        found.append(gradients(model, **inputs))
    assert_equal_gradients(*found)


class Scale(GradientCheckpointingLayer):
    """Multiplies by its weight and drops half."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.fail = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise torch.OutOfMemoryError("no room")
        return nn.functional.dropout(hidden_states * self.weight, 0.5, training=True)


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("keyword", [False, True])
def test_dropout_draws_the_same_mask_again(device: str, keyword: bool) -> None:
    layer = Scale().to(device)
    function = checkpointing.enable(layer)
    function.start_counting()
    hidden = torch.ones(64, device=device, requires_grad=True)
    output = layer(hidden_states=hidden) if keyword else layer(hidden)
    torch.rand(7, device=device)  # somebody else draws in between
    output.sum().backward()
    assert torch.equal(hidden.grad, output.detach())  # both are 0 where dropped and 2 where kept
    assert function.recomputed[id(layer)] == 1


def test_a_layer_called_twice_counts_twice_and_a_second_backward_does_not_count() -> None:
    layer = Scale()
    function = checkpointing.enable(layer)
    function.start_counting()
    loss = layer(layer(torch.ones(64))).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert (function.forward[id(layer)], function.recomputed[id(layer)]) == (2, 2)


def test_a_plain_function_is_checkpointed_although_it_has_no_layer() -> None:
    weight = nn.Parameter(torch.ones(3))
    checkpointing.LayerCheckpointing()(lambda hidden: hidden * weight, torch.ones(3)).sum().backward()
    assert torch.equal(weight.grad, torch.ones(3))


def test_reentrance_is_not_heeded_and_other_arguments_are_kept() -> None:
    used = []

    def contexts() -> tuple[Any, Any]:
        used.append("context_fn")
        return torch.enable_grad(), torch.enable_grad()

    layer = Scale()
    checkpointing.enable(layer, use_reentrant=True, context_fn=contexts)
    function = checkpointing.enable(layer, use_reentrant=True, preserve_rng_state=False)  # the Trainer's turn
    assert function.kwargs == {"context_fn": contexts, "preserve_rng_state": False}
    output = layer(torch.ones(64))  # re-entrance would lose the graph: no input requires a gradient
    output.sum().backward()
    assert layer.weight.grad is not None
    assert used == ["context_fn"]


def test_counting_keeps_neither_modules_nor_tensors_alive() -> None:
    layer = Scale()
    function = checkpointing.enable(layer)
    function.start_counting()
    hidden = torch.ones(64, requires_grad=True)
    layer(hidden).sum().backward()
    gone = weakref.ref(layer), weakref.ref(hidden)
    del layer, hidden
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert sum(function.recomputed.values()) == 1


def test_compiled_layers_are_checkpointed_and_said_to_be_uncounted(assets: Path) -> None:
    plain, ours = adapted(assets / "qwen3", enable=False), adapted(assets / "qwen3")
    layers = ours.base_model.model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = torch.compile(layer, backend="aot_eager")
    function = checkpointing.installed(ours)
    assert function is not None
    function.start_counting()
    expected = gradients(plain)
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, expected[name.replace("_orig_mod.", "")])
    assert (function.compiled, sum(function.forward.values())) == (True, 0)


# What the user asked for is respected.


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
