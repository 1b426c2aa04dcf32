"""One of two ranks of a training whose back ends differ: ``python -m tests.features.ranks_worker RANK FILE``.

Prints one JSON object: what came of each case on this rank.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import kernels
from llamafactory_ascend.features.kernels_proof import KernelsProof
from llamafactory_ascend.kernels import references
from llamafactory_ascend.kernels.backends import Backend
from llamafactory_ascend.kernels.substitution import Substitutions
from llamafactory_ascend.run import Run
from tests.kernels import tiny

IDS = torch.randint(0, 60, (1, 20), generator=torch.Generator().manual_seed(1))
swiglu = references.swiglu


def fails_on_rank_1(gate: Tensor, up: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        raise RuntimeError("ub overflow")
    return references.swiglu(gate, up)


def begin(*names: str, explicit: bool = False) -> tuple[KernelsProof, Any]:
    """A training that is about to begin, whose SwiGLU goes through functions of this module."""
    of, model = tiny.family("qwen3"), tiny.build("qwen3").train()
    theirs = tuple(Backend(name, "swiglu", f"{__spec__.name}:{name}") for name in names)
    choice = tiny.choose(of, {"swiglu": names[0]}, more=theirs)["swiglu"]
    choices = {**tiny.choose(of, {}), "swiglu": replace(choice, usable=theirs, explicit=explicit)}
    plan = kernels.Plan(of, choices, False, "cpu", Substitutions())
    kernels._plans[:] = [plan]
    kernels.ascend_after_model(Run(), model)
    proof = KernelsProof(Run(), plan)
    proof.on_train_begin(None, None, None)
    return proof, model


def step(proof: KernelsProof, model: nn.Module, idle: bool = False) -> None:
    proof.on_step_begin(None, None, None, model=model)
    if not idle:
        model(input_ids=IDS, use_cache=False).logits.sum().backward()
    proof.on_step_end(None, None, None, model=model)


def found(proof: KernelsProof) -> dict[str, Any]:
    (switch,) = proof.plan.done.switches.values()
    return {"backend": switch.backend, "given_up": switch.failures, "settled": proof.settled}


def evaluated_first() -> dict[str, Any]:
    proof, model = begin("fails_on_rank_1", "swiglu")
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    proof.on_evaluate(None, None, None)
    before = found(proof)
    step(proof, model)
    return {**found(proof), "before": before}


def used_late() -> dict[str, Any]:
    """Rank 1 calls it in the third step; the fourth finds them together."""
    proof, model = begin("fails_on_rank_1", "swiglu")
    settled = []
    for idle in (True, dist.get_rank() == 1, False, False):
        step(proof, model, idle)
        settled.append(proof.settled)
    return {**found(proof), "steps": settled}


def not_the_same() -> dict[str, Any]:
    return found(begin(*(("fails_on_rank_1",) if dist.get_rank() == 0 else ()), "swiglu")[0])


def named() -> dict[str, Any]:
    """The one that fails says so itself, before anything is agreed."""
    proof, model = begin("fails_on_rank_1", explicit=True)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model(input_ids=IDS, use_cache=False)
    return found(proof)


def outcome(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return case()
    except AscendError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    cases = (evaluated_first, used_late, not_the_same, named)
    print(json.dumps({case.__name__: outcome(case) for case in cases}))
    dist.destroy_process_group()
