"""A training with `checkpointing: auto` on the simulated NPU, without a Trainer.

As a program it is one of two ranks, each with batches of its own size, and prints the layers kept in each
step: ``python -m tests.features.checkpointing_training RANK FILE``.
"""

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.checkpointing_auto import CheckpointingAuto
from llamafactory_ascend.features.checkpointing_proof import CheckpointingProof
from llamafactory_ascend.run import Run
from llamafactory_ascend.settings import Settings

WIDTH = 64
MIB = 1 << 20


class Wide(GradientCheckpointingLayer):
    """Saves eight times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Model(nn.Module):
    """Eight layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(8))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = inputs
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": hidden.square().mean()}


class Training:
    """What the Trainer does, with its events, on the simulated NPU; bytes beside what is there before."""

    def __init__(self, budget: float | None) -> None:
        self.before = torch.npu.memory_allocated()
        settings = {"memory_budget": f"{(self.before + budget) / MIB}MiB"} if budget else {}
        self.run = Run(settings=Settings(checkpointing="auto" if budget else "full", **settings))
        torch.manual_seed(0)
        self.model = Model().to("npu").train()
        checkpointing.enable(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.proof = CheckpointingProof(self.run)
        self.callbacks = [self.proof, *([CheckpointingAuto(self.run, self.proof)] if budget else [])]
        self.state = SimpleNamespace(global_step=0)
        self.args = SimpleNamespace(
            device=torch.device("npu", torch.npu.current_device()), torch_compile=False
        )
        self.peak = 0
        self.tell("on_train_begin")

    def tell(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.args, self.state, None, model=self.model)

    def step(self, *rows: int) -> list[float]:
        """Take a step of a micro-batch of each number of rows; return its losses."""
        self.tell("on_step_begin")
        losses = []
        for size in rows:
            torch.npu.reset_peak_memory_stats()
            loss = self.model(torch.full((size, WIDTH), 0.1, device="npu"))["loss"]
            loss.backward()
            losses.append(loss.item())
            self.peak = max(self.peak, torch.npu.max_memory_allocated() - self.before)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.global_step += 1
        self.tell("on_step_end")
        return losses

    @property
    def function(self) -> checkpointing.LayerCheckpointing:
        found = checkpointing.installed(self.model)
        assert found is not None
        return found

    @property
    def kept(self) -> int:
        """Layers kept in the last forward pass."""
        return len(self.function.kept)


if __name__ == "__main__":
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=2)
    training = Training(7 * MIB)
    kept = []
    for rows in (512, 512, 512) if rank else (256, 256, 600):
        training.step(rows)
        kept.append(training.kept)
    print(json.dumps({"kept": kept, "peak": training.peak}))
    dist.destroy_process_group()
