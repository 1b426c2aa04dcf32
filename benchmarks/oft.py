"""OFT layers with shared exact rotations against PEFT's: launches, time, and how orthogonal training stays.

    python benchmarks/oft.py [--blocks 32] [--repeats 3]

The case has the shapes of Qwen2.5-VL-7B's vision tower where OFT is put: 32 blocks of a linear `qkv` (1280 to
3840) and a linear `proj` (1280 to 1280), in sequence, block size 64, frozen float32 base weights. PEFT's side
is what the host makes: the five-term series.

Launches are operators sent to a device in a forward and backward, views not counted: of all layers after the
weights have changed, shared out among them, and of one layer of PEFT by itself. Times are of an optimizer
step of 8 micro-batches of 256 patches with gradient checkpointing (the host's examples accumulate 8), 4 of
the blocks: interleaved medians of CPU time on one thread, so that a shared machine measures alike, and no
figure of an NPU. `time_ratio` compares what OFT adds to the same step of the frozen tower, `step_ratio` whole
steps. Orthogonality is |R R^T - I|_F / sqrt(b), the largest of all rotations of these blocks after 50 steps
at a learning rate of 1e-2; the merge is that of stock PEFT.

Progress goes to stderr; the last line of stdout is JSON. The exit code is 1 where something is outside of
REQUIRED.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the package, when run by its path

import torch
from peft import LoraConfig, OFTConfig, PeftModel, get_peft_model
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from llamafactory_ascend.features.oft import cayley
from llamafactory_ascend.features.oft.substitution import substitute

WIDTH, BLOCK, STEPS = 1280, 64, 50
FEW_BLOCKS, MICRO_BATCHES, PATCHES = 4, 8, 256  # what is timed and trained
VIEWS = {
    "view", "reshape", "transpose", "expand", "unsqueeze", "squeeze", "t", "detach", "_unsafe_view", "alias",
    "permute", "slice", "select", "_reshape_alias", "split", "split_with_sizes",
}  # fmt: skip
# name -> (smallest, largest)
REQUIRED = {
    "launches_per_layer": (0, 17),
    "time_ratio": (1.2, float("inf")),
    "orthogonality": (0, 1e-5),
    "row_norm_error": (0, 1e-5),
}
console = Console(stderr=True, highlight=False)


class Launches(TorchDispatchMode):
    """Counts operators that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function._schema.name.partition("::")[2] not in VIEWS
        return function(*args, **(kwargs or {}))


class Attention(nn.Module):
    """The linear modules of a vision block that OFT is put on, without the attention between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(self.qkv(x)[..., : x.shape[-1]])


class Tower(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(width) for _ in range(blocks))
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


def adapt(model: nn.Module, series: bool, targets: list[str]) -> PeftModel:
    config = OFTConfig(r=0, oft_block_size=BLOCK, target_modules=targets, use_cayley_neumann=series)
    return get_peft_model(copy.deepcopy(model), config)


def make_pair(model: nn.Module) -> tuple[PeftModel, PeftModel]:
    """Return the model with the plugin's rotations and with PEFT's default."""
    ours, peft = (adapt(model, series, ["qkv", "proj"]) for series in (False, True))
    substitute(ours)
    return ours, peft


def count_step(model: nn.Module, x: Tensor) -> int:
    """Return the launches of a forward and backward after the weights have changed; gradients add up."""
    model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1e-3)
    with Launches() as launches:
        model(x).sum().backward()
    return launches.count


def count_single(config: Any, x: Tensor) -> int:
    """Return the launches of one layer of PEFT by itself."""
    return count_step(get_peft_model(nn.Sequential(nn.Linear(WIDTH, WIDTH)), config), x)


def compare_times(tower: nn.Module, repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of an optimizer step: frozen, with ours and with PEFT's, in turns."""
    tower.checkpointing = True
    ours, peft = make_pair(tower)
    models = {"frozen": copy.deepcopy(tower).requires_grad_(False), "ours": ours, "peft": peft}
    optimizers = {name: make_optimizer(model, 1e-4) for name, model in models.items() if name != "frozen"}
    x = torch.randn(1, PATCHES, WIDTH, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in models}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for turn in range(repeats + 1):
        for name, model in models.items():
            begun = time.process_time()
            step(model, optimizers.get(name), x, MICRO_BATCHES)
            if turn:  # the first is a warm-up
                times[name].append(time.process_time() - begun)
        console.print(f"{turn}/{repeats}: { ({name: round(t[-1], 2) for name, t in times.items() if t}) }")
    torch.set_num_threads(threads)
    return {name: statistics.median(found) for name, found in times.items()}


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate, weight_decay=0.0)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, x: Tensor, micro_batches: int = 1
) -> None:
    for _ in range(micro_batches):
        (model(x) - x.detach().roll(1, -1)).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def train(model: PeftModel, x: Tensor) -> float:
    """Train, and return the largest error of the rotations as the adapter's configuration has them."""
    optimizer = make_optimizer(model, 1e-2)
    for _ in range(STEPS):
        step(model, optimizer, x)
    config = model.peft_config["default"]
    rotate = cayley.cayley
    if config.use_cayley_neumann:
        rotate = lambda weight: cayley.series(weight, config.num_cayley_neumann_terms)  # noqa: E731
    weights = [p.detach() for name, p in model.named_parameters() if "oft_R" in name]
    return float(torch.stack([cayley.orthogonality_error(rotate(weight)).max() for weight in weights]).max())


def compare_row_norms(model: PeftModel, base: nn.Module) -> float:
    """Merge with PEFT, and return the largest relative change of the norm of any adapted weight's row."""
    merged = model.merge_and_unload()
    worst = []
    for (name, before), (_, after) in zip(base.named_parameters(), merged.named_parameters(), strict=True):
        if name.endswith("weight"):
            norms = [tensor.detach().double().norm(dim=1) for tensor in (before, after)]
            assert not torch.equal(before, after), name
            worst.append(((norms[1] - norms[0]) / norms[0]).abs().max())
    return float(torch.stack(worst).max())  # Python's max would hide NaN


def measure(blocks: int, repeats: int) -> dict[str, Any]:
    """Measure everything and return the figures."""
    torch.manual_seed(0)
    tower, x = Tower(blocks, WIDTH), torch.randn(1, 16, WIDTH, requires_grad=True)
    with console.status("launches"):
        bare = count_step(copy.deepcopy(tower).requires_grad_(False), x)
        count = count_step(make_pair(tower)[0], x)
        single = OFTConfig(r=0, oft_block_size=BLOCK, target_modules=["0"])
        peft_launches = count_single(single, x)
        lora_launches = count_single(LoraConfig(r=32, lora_dropout=0.0, target_modules=["0"]), x)
        alone = count_step(nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(False), x)
    # In place of what surrounds the layers here, what surrounds the one layer of PEFT and of LoRA: its base
    # layer, the loss, the gradient of the input.
    launches = (count - bare) / (2 * blocks) + alone
    console.print(f"launches: {count} in a step, {bare} of them without adapters; {alone} of a layer alone")
    tower = Tower(FEW_BLOCKS, WIDTH)
    seconds = compare_times(tower, repeats)
    with console.status("training"):
        tower.checkpointing = False
        ours, peft = make_pair(tower)
        errors = [train(model, x) for model in (ours, peft)]
        norms = [compare_row_norms(model, tower) for model in (ours, peft)]
    return {
        "case": f"{blocks} vision blocks of Qwen2.5-VL-7B's width: qkv and proj, block size {BLOCK}",
        "launches_per_layer": round(launches, 2),
        "peft_launches_per_layer": peft_launches,
        "lora_launches_per_layer": lora_launches,
        "time_ratio": round((seconds["peft"] - seconds["frozen"]) / (seconds["ours"] - seconds["frozen"]), 3),
        "step_ratio": round(seconds["peft"] / seconds["ours"], 3),
        "time_measured": f"CPU time, 1 thread, {FEW_BLOCKS} blocks, {MICRO_BATCHES} x {PATCHES} patches",
        "trained": f"{FEW_BLOCKS} blocks, {STEPS} steps at 1e-2",
        "orthogonality": errors[0],
        "peft_orthogonality": errors[1],
        "row_norm_error": norms[0],
        "peft_row_norm_error": norms[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="OFT with shared exact rotations against PEFT's OFT.")
    parser.add_argument("--blocks", type=int, default=32, help="vision blocks (32)")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each (3)")
    given = parser.parse_args()
    figures = measure(given.blocks, given.repeats)
    missed = [name for name, (low, high) in REQUIRED.items() if not low <= figures[name] <= high]
    for name in missed:
        console.print(f"{name} is {figures[name]}, required: {REQUIRED[name]}")
    print(json.dumps(figures))
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
