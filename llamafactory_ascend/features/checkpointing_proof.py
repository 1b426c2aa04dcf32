"""Proof of checkpointing: re-asserted when training begins, counted in the first step, compared with the plan."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback

from llamafactory_ascend import log
from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.layers import Layer, plan

if TYPE_CHECKING:
    from llamafactory_ascend.run import Run


class CheckpointingProof(TrainerCallback):
    """Holds checkpointing in place against Trainer, PEFT and FSDP, and counts what it did on this rank."""

    def __init__(self, run: "Run") -> None:
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        function = checkpointing.installed(model)
        if function is None:
            self.run.miss("checkpointing", "gradient checkpointing was switched off after the model was built")
            return
        lost = checkpointing.disturbed(model, function)
        if lost:
            log.warn(f"checkpointing: {len(lost)} modules had been changed after the model was built, put back")
            checkpointing.enable(model)
        checkpointing.remove_input_grad_hooks(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        function = checkpointing.installed(model)
        if function is not None and function.counting:
            function.counting = False
            section = self.run.facts["checkpointing"] = compare(plan(model), function)
            for problem in section["problems"]:
                self.run.miss("checkpointing", problem)


def compare(layers: dict[int, Layer], function: checkpointing.LayerCheckpointing) -> dict[str, Any]:
    """Set what the first step did beside what the plan expects.

    Returns:
        Counts by component (text, projector, vision): all ``layers``, ``expected`` and ``checkpointed`` (its
        forward ran through the checkpoint and its backward recomputed it), ``without_graph``, ``not_called``;
        and ``problems``, a sentence for each kind of layer that did not do what it should.
    """
    counts = {key: Counter[str]() for key in ("layers", "expected", "checkpointed", "without_graph", "not_called")}
    wrong: dict[str, list[str]] = {}
    for key, layer in layers.items():
        forward, recomputed, plain = (c[key] for c in (function.forward, function.recomputed, function.plain))
        counts["layers"][layer.component] += 1
        counts["expected"][layer.component] += layer.needs_graph
        if forward:
            counts["checkpointed"][layer.component] += recomputed == forward
            if recomputed != forward:
                wrong.setdefault("checkpointed, but backward recomputed it less often", []).append(layer.name)
        elif plain:
            counts["without_graph"][layer.component] += 1
            if layer.needs_graph and not layer.only_with_images:
                wrong.setdefault("run without a graph although backward must pass through it", []).append(layer.name)
        else:
            counts["not_called"][layer.component] += 1
            if layer.needs_graph and layer.component == "text":
                wrong.setdefault("never run through checkpointing in the first step", []).append(layer.name)
    problems = [f"{len(names)} layers {how}, e.g. {names[0]}" for how, names in wrong.items()]
    return {**{key: dict(value) for key, value in counts.items()}, "problems": problems}
