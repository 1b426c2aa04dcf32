"""`checkpointing: offload` on the simulated NPU: where the inputs of layers are until backward."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.checkpointing_offload import HostInputs
from tests.training import gradients

WIDTH, ROWS, LAYERS = 32, 256, 8
HIDDEN = ROWS * WIDTH * torch.float32.itemsize


class Add(GradientCheckpointingLayer):
    """Adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return hidden + nn.functional.dropout(hidden * self.weight * factor, 0.5, training=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Add() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor, factor: torch.Tensor) -> Any:
        for layer in self.layers:
            hidden = layer(hidden, factor)
        return type("Output", (), {"loss": hidden.square().mean()})


def make(offload: bool) -> tuple[Model, checkpointing.LayerCheckpointing]:
    torch.manual_seed(0)
    model = Model().to("npu").train()
    function = checkpointing.enable(model)
    function.host_inputs = HostInputs() if offload else None
    return model, function


def inputs(rows: int = ROWS) -> dict[str, torch.Tensor]:
    return {
        "hidden": torch.ones(rows, WIDTH, device="npu"),
        "factor": torch.full((WIDTH,), 2.0, device="npu"),
    }


def peak_of_step(model: Model) -> tuple[int, list[torch.Tensor | None]]:
    """Return the requested bytes that a step takes at its peak, and its gradients."""
    model.zero_grad()
    batch = inputs()
    before = torch.npu.memory_stats()["requested_bytes.all.current"]
    torch.npu.reset_peak_memory_stats()
    found = gradients(model, **batch)
    return torch.npu.memory_stats()["requested_bytes.all.peak"] - before, list(found.values())


def test_hidden_states_leave_the_device_and_come_back_as_they_were() -> None:
    (full, expected), (offload, found) = (peak_of_step(make(offload)[0]) for offload in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    # The first input is the batch's own. One more is fetched ahead.
    assert LAYERS - 3 <= (full - offload) / HIDDEN <= LAYERS - 1


def test_every_input_is_moved_into_buffers_that_are_used_again() -> None:
    model, function = make(offload=True)
    assert function.host_inputs is not None
    function.start_counting()
    gradients(model, **inputs())
    buffers = {buffer.data_ptr() for buffer in function.host_inputs.buffers}
    assert function.host_inputs.moved == function.forward.total() == len(buffers) == LAYERS
    gradients(model, **inputs(ROWS // 2))
    assert {buffer.data_ptr() for buffer in function.host_inputs.buffers} == buffers
    assert function.host_inputs.pinned == LAYERS * HIDDEN
    gradients(model, **inputs(2 * ROWS))
    sizes = [buffer.nbytes for buffer in function.host_inputs.buffers]
    assert function.host_inputs.pinned == sum(sizes) == 2 * LAYERS * HIDDEN
    assert all(buffer.is_pinned() for buffer in function.host_inputs.buffers)


def test_a_graph_that_is_kept_can_be_used_again() -> None:
    model, function = make(offload=True)
    assert function.host_inputs is not None
    loss = model(**inputs()).loss
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    assert not function.host_inputs.buffers
    loss.backward()
    for parameter, gradient in zip(model.parameters(), first, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)


def test_a_host_that_cannot_pin_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("aclrtMallocHost failed\nmore lines")

    monkeypatch.setattr(torch, "empty", refuse)
    message = "cannot pin 100 bytes for this rank: aclrtMallocHost failed\n  next: lower `cutoff_len`"
    with pytest.raises(AscendError, match=message):
        HostInputs().take(100)
