"""Trainings with a full-size step, and one of two ranks of them under FSDP2.

``python -m tests.features.stress.worker ASSETS FOLDER``, with torchrun's variables, prints a line of JSON:
what came of each case on this rank.
"""

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.gradient_callback import GradientAudit
from llamafactory_ascend.features.stopping_callback import Stopping
from llamafactory_ascend.features.stress.callback import Stress
from llamafactory_ascend.run import Arguments, Run
from tests.training import ATTENTION, load, trainer

FSDP = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
}


def prepared(assets: Path, folder: Path, run: Run | None = None, cutoff_len: int = 32, **changes: Any) -> Any:
    """Two optimizer steps of 2 x 2 rows of 12 tokens, with dropout."""
    model = load(assets / "qwen3")
    checkpointing.enable(model)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=ATTENTION, lora_dropout=0.1, init_lora_weights=False)
    settings = {
        "gradient_accumulation_steps": 2,
        "weight_decay": 0.1,
        "learning_rate": 1e-3,
        "dataloader_pin_memory": False,
    }
    made = trainer(get_peft_model(model, config).train(), folder, **{**settings, **changes})
    if run is not None:
        made.add_callback(Stopping(run, made))
        made.add_callback(GradientAudit(run))
        made.add_callback(Stress(run, made, cutoff_len))
    return made


def run_of() -> Run:
    arguments = Arguments(None, None, SimpleNamespace(do_train=True), SimpleNamespace(stage="sft"), None)
    return Run(arguments=arguments)


def left(made: Any) -> list[Any]:
    """All that a training leaves on this rank: its log, weights, optimizer state and random states."""
    logged = ("loss", "grad_norm", "learning_rate", "eval_loss")
    log = [[entry[key] for key in logged if key in entry] for entry in made.state.log_history]
    parameters = [p for group in made.optimizer.param_groups for p in group["params"]]
    tensors = parameters + [made.optimizer.state[p]["exp_avg_sq"] for p in parameters]
    local = [getattr(x.detach(), "to_local", x.detach)().cpu().clone() for x in tensors]
    drawn = [torch.rand(3), torch.tensor(random.random()), torch.tensor(np.random.rand())]
    return [log, *local, *drawn]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def main(assets: Path, folder: Path) -> None:
    settings = {"use_cpu": False, "eval_strategy": "epoch", **FSDP}
    plain, run = prepared(assets, folder / "plain", **settings), run_of()
    plain.train()
    expected = left(plain)
    stressed = prepared(assets, folder / "stressed", run, **settings)
    stressed.train()
    found = {"equal": equal(left(stressed), expected), "section": run.facts["stress"]}
    short = prepared(assets, folder / "short", run_of(), cutoff_len=256, **settings)
    if os.environ["RANK"] == "1":
        _, total = torch.npu.mem_get_info()
        torch.npu.set_per_process_memory_fraction((torch.npu.memory_reserved() + 2**20) / total)
    try:
        short.train()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found), flush=True)
    os._exit(1)  # as a rank dies, without a word to the other


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
