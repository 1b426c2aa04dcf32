"""The proof of checkpointing: the right step is counted, and every way of losing checkpointing is noticed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.checkpointing_proof import CheckpointingProof
from llamafactory_ascend.run import Run
from llamafactory_ascend.settings import Settings
from tests.training import Do, adapted, trainer


def section(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = run.facts["checkpointing"]
    return found


GOOD = {
    "layers": {"vision": 2, "text": 4},
    "expected": {"vision": 0, "text": 1},
    "checkpointed": {"text": 1},
    "kept": {},
    "without_graph": {"text": 3},
    "not_called": {"vision": 2},
    "compiled": False,
    "problems": [],
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"eval_on_start": True},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
)
def test_the_first_step_is_counted(assets: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    run, model = Run(), adapted(assets / "qwen3_5")
    trainer(model, tmp_path, CheckpointingProof(run), **changes).train()
    assert section(run) == GOOD
    function = checkpointing.installed(model)
    assert function is not None
    assert not function.counting
    assert sum(function.forward.values()) == changes.get("gradient_accumulation_steps", 1)  # not step 2


def test_the_first_step_after_a_resume_and_of_a_second_training_is_counted(
    assets: Path, tmp_path: Path
) -> None:
    model, steps = adapted(assets / "qwen3_5"), []
    note = Do("on_step_end", lambda _: steps.append(dict(run.facts)))
    run = Run()
    trainer(
        model, tmp_path, CheckpointingProof(run), note, save_strategy="steps", save_steps=1, max_steps=1
    ).train()
    run = Run()
    training = trainer(model, tmp_path, CheckpointingProof(run), note)
    training.train(resume_from_checkpoint=True)
    assert training.state.global_step == 2
    assert [found["checkpointing"] for found in steps] == [GOOD, GOOD]
    run.facts.clear()
    training.train()
    assert section(run) == GOOD


def test_a_step_repeated_after_running_out_of_memory_is_counted_alone(assets: Path, tmp_path: Path) -> None:
    model, run = adapted(assets / "qwen3_5"), Run()
    last, sizes = model.base_model.model.lm_head, []

    def run_out(module: nn.Module, args: Any) -> None:
        sizes.append(args[0].shape[0])
        if sizes[-1] > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    last.register_forward_pre_hook(run_out)
    trainer(model, tmp_path, CheckpointingProof(run), auto_find_batch_size=True).train()
    assert sizes[0] == 2
    assert set(sizes[1:]) == {1}
    assert section(run) == GOOD


def bypass(model: nn.Module) -> None:
    """A layer that calls its forward past GradientCheckpointingLayer."""
    layer = model.base_model.model.model.language_model.layers[3]
    layer.__class__ = type("Bypass", (type(layer),), {"__call__": nn.Module.__call__})


def put_reentrance_back(model: nn.Module) -> None:
    """What Transformers' own method does, through a base class of no known name."""
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)
    model.enable_input_require_grads()


def put_reentrance_on_one_layer(model: nn.Module) -> None:
    layers = model.base_model.model.model.language_model.layers
    layers[3]._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)
    layers[2].register_forward_hook(lambda _, __, output: output.requires_grad_(True))


def hook_inputs(model: nn.Module) -> None:
    model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_(True))


def switch_off(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False


def detach_last_layer(model: nn.Module) -> None:
    """Backward does not come to the adapter any more, that of the output head aside."""
    model.base_model.model.lm_head.weight.requires_grad_(True)
    layer = model.base_model.model.model.language_model.layers[3]
    layer.register_forward_hook(lambda _, __, output: output.detach())


WRONG: list[tuple[Callable[[nn.Module], None], str]] = [
    (bypass, "1 layers run past their checkpointing"),
    (put_reentrance_back, "modules were given another function"),
    (put_reentrance_on_one_layer, "1 modules were given another function"),
    (hook_inputs, "3 layers built a graph although nothing before them trains"),
    (switch_off, "1 layers run past their checkpointing"),
    (detach_last_layer, "1 layers checkpointed, but backward recomputed them less often"),
]


@pytest.mark.parametrize(("spoil", "problem"), WRONG, ids=[spoil.__name__ for spoil, _ in WRONG])
def test_what_goes_wrong_after_training_began_is_noticed(
    assets: Path, tmp_path: Path, spoil: Callable[[nn.Module], None], problem: str
) -> None:
    run = Run()
    trainer(
        adapted(assets / "qwen3_5"), tmp_path, CheckpointingProof(run), Do("on_train_begin", spoil)
    ).train()
    assert any(problem in found for found in section(run)["problems"]), section(run)
    assert any(problem in finding.message for finding in run.findings)


@pytest.mark.parametrize("settings", [Settings(strict=True), Settings(checkpointing="full")])
def test_what_goes_wrong_ends_a_run_that_asked_for_it(
    assets: Path, tmp_path: Path, settings: Settings
) -> None:
    run = Run(settings=settings)
    with pytest.raises(AscendError, match="run past their checkpointing"):
        trainer(
            adapted(assets / "qwen3_5"), tmp_path, CheckpointingProof(run), Do("on_train_begin", bypass)
        ).train()


@pytest.mark.parametrize("spoil", [put_reentrance_back, switch_off, hook_inputs])
def test_what_went_wrong_before_training_begins_is_put_right(
    assets: Path, tmp_path: Path, spoil: Callable[[nn.Module], None]
) -> None:
    run, model = Run(), adapted(assets / "qwen3_5")
    training = trainer(model, tmp_path, CheckpointingProof(run), gradient_checkpointing=False)
    if spoil is hook_inputs:
        model.enable_input_require_grads()
    else:
        # one module keeps ours, as those do that a partial re-enabling misses
        kept = model.base_model.model.model.language_model.layers[0]
        function = kept._gradient_checkpointing_func
        spoil(model)
        kept._gradient_checkpointing_func = function
    training.train()
    assert section(run) == GOOD


def test_a_model_that_lost_its_checkpointing_before_training_is_a_miss(assets: Path, tmp_path: Path) -> None:
    model, run = adapted(assets / "qwen3_5", enable=False), Run()
    trainer(model, tmp_path, CheckpointingProof(run), gradient_checkpointing=False).train()
    assert [finding.subject for finding in run.findings] == ["checkpointing"]
    assert "no layer is checkpointed" in run.findings[0].message
