"""The proof of the kernels in a training step, and models beside the trained one."""

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import kernels
from llamafactory_ascend.features.kernels_proof import KernelsProof, State, difference
from llamafactory_ascend.kernels import references
from llamafactory_ascend.kernels.backends import Backend
from llamafactory_ascend.run import Run
from llamafactory_ascend.settings import read
from tests.features.test_kernels import RULE, forget, prepare
from tests.kernels import tiny
from tests.kernels.test_substitution import NORM, right_norm

IDS = torch.randint(0, 60, (2, 70), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    forget()


def greedy_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """No room for the probe, whose inputs are leaves of a graph; room for the training."""
    if x.is_leaf and x.requires_grad:
        raise torch.OutOfMemoryError("NPU out of memory")
    return right_norm(x, weight, eps)


def short_of_memory_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    raise RuntimeError("no such kernel")


swiglu = references.swiglu


def plan(*norms: str, explicit: bool = False) -> kernels.Plan:
    """The plan of a training whose norms go through functions of this module, the first one first."""
    from llamafactory_ascend.kernels.substitution import Substitutions

    of = tiny.family("qwen3_5")
    theirs = tuple(replace(NORM, name=name, target=f"{__name__}:{name}") for name in norms)
    gate = Backend("theirs", "swiglu", f"{__name__}:swiglu")
    choices = tiny.choose(of, {"rms_norm_1p": norms[0], "swiglu": "theirs", **RULE}, more=[*theirs, gate])
    choices["rms_norm_1p"] = replace(choices["rms_norm_1p"], usable=theirs, explicit=explicit)
    made = kernels.Plan(of, choices, False, "cpu", Substitutions())
    kernels._plans[:] = [made]
    return made


def step(proof: KernelsProof, *models: nn.Module) -> None:
    """A training step of the first model; the others are asked without a graph."""
    proof.on_step_begin(None, None, None, model=models[0])
    for beside in models[1:]:
        logits(beside)
    models[0](input_ids=IDS, use_cache=False).logits.sum().backward()
    for beside in models[1:]:
        logits(beside)
    proof.on_step_end(None, None, None, model=models[0])


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def test_a_reference_model_computes_alike() -> None:
    """Equal models, equal logits to the last digit; with stock's norms in one of them they differ."""
    made, run = plan("right_norm"), Run()
    policy, reference, reward = (tiny.build("qwen3_5_text") for _ in range(3))
    kernels.ascend_after_model(run, policy.train())
    kernels.compute_alike(run, reference.eval())
    assert not torch.equal(logits(policy), logits(reward.eval()))
    kernels.compute_alike(run, reward)
    assert torch.equal(logits(policy), logits(reference)) and torch.equal(logits(policy), logits(reward))
    assert run.decisions["kernels.beside.2"].choice == "21 modules of Qwen3_5ForCausalLM"
    proof = KernelsProof(run, made)
    proof.on_train_begin(None, None, None)
    step(proof, policy, reference, reward)
    assert made.attested is not None and run.findings == []
    calls = {name: (found["modules"], found["calls"]) for name, found in made.attested.items()}
    rule = dict.fromkeys(RULE, (3, 3))
    assert calls == {"rms_norm_1p": (11, 11), "swiglu": (4, 4), **rule}  # those of the policy
    kernels.compute_alike(run, tiny.build("qwen3_5_text"))  # not of this training, which has begun
    assert len(made.beside) == 2


def test_a_reference_model_follows_what_is_given_up() -> None:
    made, run = plan("short_of_memory_norm", "right_norm"), Run()
    policy, reference = (tiny.build("qwen3_5_text") for _ in range(2))
    kernels.ascend_after_model(run, policy)
    kernels.compute_alike(run, reference)
    assert torch.equal(logits(reference), logits(policy))
    assert made.done.switches["rms_norm_1p", "Qwen3_5RMSNorm"].backend == "right_norm"


def test_a_reference_model_does_without_what_the_trained_one_does_without() -> None:
    made, run = plan("right_norm"), Run()
    policy, reference = (tiny.build("qwen3_5_text") for _ in range(2))
    for module in policy.modules():
        if type(module).__name__ == "Qwen3_5RMSNorm":
            module.forward = module.forward  # type: ignore[method-assign]
    kernels.ascend_after_model(run, policy)
    kernels.compute_alike(run, reference)
    assert {slot.switch.operator for slot in made.beside[0].slots} == {"swiglu", *RULE}
    assert torch.equal(logits(policy), logits(reference))


def test_without_kernels_a_reference_model_is_left_alone() -> None:
    run, model = prepare("off", device="cpu"), tiny.build("qwen3_5_text")
    kernels.compute_alike(run, model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("setting", ["strict", "asked", "neither"])
def test_a_probe_without_memory_is_said(setting: str) -> None:
    """What was not compared has not passed."""
    blocks: dict[str, Any] = {
        "strict": {"strict": True}, "asked": {"kernels": {"rms_norm_1p": "auto"}}, "neither": {},
    }  # fmt: skip
    made, run = plan("greedy_norm"), Run(settings=read(blocks[setting], "test.yaml"))
    model = tiny.build("qwen3_5_text").train()
    kernels.ascend_after_model(run, model)
    proof = KernelsProof(run, made)
    proof.on_train_begin(None, None, None)
    message = "rms_norm_1p: greedy_norm was not compared with Qwen3_5RMSNorm: the device has no memory"
    if setting != "neither":
        with pytest.raises(AscendError, match=message):
            step(proof, model)
        return
    step(proof, model)
    (finding,) = run.findings
    assert finding.level == "warning" and message in finding.message
    assert proof.settled


def test_what_was_not_reached_is_probed_when_it_is() -> None:
    """As a tower is where the first batch has no image: compared in the step that uses it."""
    made, run = plan("right_norm"), Run()
    model: Any = tiny.build("qwen3_5_text").train()
    kernels.ascend_after_model(run, model)
    proof = KernelsProof(run, made)
    proof.on_train_begin(None, None, None)
    mlps = [layer.mlp for layer in model.model.layers]
    for layer in model.model.layers:
        layer.mlp = nn.Identity()
    step(proof, model)
    switch = made.done.switches["swiglu", "Qwen3_5MLP"]
    assert switch.comparison is None and not proof.settled
    for layer, mlp in zip(model.model.layers, mlps, strict=True):
        layer.mlp = mlp
    logits(model)  # an evaluation between steps probes nothing
    assert switch.comparison is None
    step(proof, model)
    assert switch.comparison is not None and switch.comparison.passed and proof.settled


def test_a_model_is_let_go() -> None:
    """The plan outlives the run of its models, the report wants it; the models do not."""
    run = prepare(RULE, device="cpu")
    models = [tiny.build("qwen3_5_text") for _ in range(2)]
    kernels.ascend_after_model(run, models[0])
    kernels.compute_alike(run, models[1])
    made = kernels.plan()
    assert made is not None
    proof = KernelsProof(run, made)
    proof.on_train_begin(None, None, None)
    step(proof, *models)
    gone = [weakref.ref(model) for model in models]
    models.clear()
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert kernels.ascend_report_sections(run)["kernels"]["attested"]["causal_conv1d"]["called"] == 3
    forget()


def test_where_ranks_differ() -> None:
    same: State = {("rope", "a"): ("fla", {}), ("swiglu", "b"): ("pytorch", {"fla": "it differs"})}
    assert difference([same, same, same]) == ""
    assert difference([same, {("rope", "a"): ("pytorch", {})}, same]) == (
        "rope (a): fla on rank 0,2, pytorch on rank 1; "
        "swiglu (b): pytorch on rank 0,2, transformers on rank 1"
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of the cases of `ranks_worker` on two ranks."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.features.ranks_worker", str(rank), str(store)],
            env={**os.environ, "RANK": str(rank), "PYTHONPATH": "", "LLAMAFACTORY_ASCEND": "0"},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    return [json.loads(text.splitlines()[-1]) for text in texts]


FAILED = "its first use failed: RuntimeError: ub overflow"


@pytest.mark.parametrize("case", ["evaluated_first", "used_late"])
def test_what_one_rank_gives_up_all_give_up(ranks: list[dict[str, Any]], case: str) -> None:
    """Given up outside a step, or in a later one than the first: both ranks go on with the next."""
    for rank, found in enumerate(ranks):
        reason = FAILED if rank == 1 else f"on rank 1 {FAILED}"
        assert found[case]["backend"] == "swiglu"
        assert found[case]["given_up"] == {"fails_on_rank_1": reason}
        assert found[case]["settled"] is True
    assert [found["evaluated_first"]["before"]["backend"] for found in ranks] == ["swiglu", "swiglu"]
    assert ranks[0]["used_late"]["steps"] == ranks[1]["used_late"]["steps"] == [False, False, False, True]


def test_ranks_that_have_not_the_same(ranks: list[dict[str, Any]]) -> None:
    """They would train on different numbers: an error on each before the first step."""
    expected = (
        "kernels: the ranks compute with different back ends: "
        "swiglu (Qwen3MLP): fails_on_rank_1 on rank 0, swiglu on rank 1"
    )
    assert all(expected in found["not_the_same"]["error"] for found in ranks)


def test_what_was_named_is_an_error_where_it_fails(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["named"]["backend"] == "fails_on_rank_1"
    assert "fails_on_rank_1 cannot be used for Qwen3MLP" in ranks[1]["named"]["error"]
