"""Checkpointing: what it saves, that it computes the same, and that what the user asked for is respected."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from llamafactory_ascend.features import checkpointing
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
