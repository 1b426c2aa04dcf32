"""Proof of checkpointing: put right at train begin, counted in the first step, compared with the plan."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback

from llamafactory_ascend import log
from llamafactory_ascend.features import checkpointing
from llamafactory_ascend.features.layers import Layer, plan

if TYPE_CHECKING:
    from llamafactory_ascend.run import Run


class CheckpointingProof(TrainerCallback):  # type: ignore[misc]
    """Holds checkpointing in place against Trainer, PEFT and FSDP, and counts what it did on this rank.

    The step counted is the first that ends after each begin of a training: resumed, repeated with a smaller
    batch after running out of memory, or a second ``train()``; and the one after each decision of `auto`. The
    plan is made when that step begins, for by then every wrapper is in place and a block-wise optimizer has
    not moved on yet.
    """

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.function: checkpointing.LayerCheckpointing | None = None
        self.watch: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.close()
        self.function = checkpointing.installed(model)
        if self.function is None:
            what = f"{type(model).__name__} supports no checkpointing, or it was switched off after the build"
            self.run.miss("checkpointing", f"no layer is checkpointed: {what}")
            return
        lost = checkpointing.disturbed(model, self.function)
        if lost:
            log.warn(f"checkpointing: {len(lost)} modules were changed after the model was built: put back")
            checkpointing.enable(model)
        checkpointing.remove_input_grad_hooks(model)

    def count_again(self, model: nn.Module) -> None:
        """Count the step that begins next."""
        self.function = checkpointing.installed(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self.function is not None and self.watch is None:
            # A hook that torch.compile has traced stays in the graph when it is removed.
            self.watch = Watch(model, plan(model), hooked=not args.torch_compile)
            self.function.start_counting()

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self.function is None or self.watch is None:
            return
        section = compare(self.watch, self.function)
        lost = checkpointing.disturbed(model, self.function)
        if lost:
            section["problems"].append(f"{len(lost)} modules were given another function, e.g. {lost[0]}")
        self.run.facts["checkpointing"] = section
        self.close()
        for problem in section["problems"]:
            if log.rank():  # a finding is printed by rank 0 alone, and this rank's layers may differ
                log.warn(f"checkpointing: {problem}", every_rank=True)
            self.run.miss("checkpointing", problem)

    def close(self) -> None:
        """Stop counting and watching."""
        if self.function is not None:
            self.function.counting = False
        if self.watch is not None:
            self.watch.remove()
        self.function = self.watch = None


class Watch:
    """A plan, and which of the modules that hold its layers really ran for training.

    A layer that is not called although the module above it ran was run past its checkpointing; a vision
    tower that was not called at all had nothing to do.
    """

    def __init__(self, model: nn.Module, layers: dict[int, Layer], hooked: bool = True) -> None:
        self.layers = layers
        self.ran: set[int] = set()
        containers = {layer.container for layer in layers.values()} if hooked else set()
        self.handles = [
            module.register_forward_pre_hook(self._note)
            for module in model.modules()
            if id(module) in containers
        ]

    def _note(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self.ran.add(id(module))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def compare(watch: Watch, function: checkpointing.LayerCheckpointing) -> dict[str, Any]:
    """Set what the first step did beside what the plan expects.

    Returns:
        Counts by component (text, projector, vision): all ``layers``, ``expected`` and ``checkpointed`` (its
        forward ran through the checkpoint and its backward recomputed it), ``kept`` (left un-recomputed by
        `auto`; perhaps not in every micro-batch), ``without_graph``, ``not_called``; ``compiled``, true where
        torch.compile hides calls from counting; and ``problems``, a sentence for each kind of layer that did
        not do what it should.
    """
    keys = ("layers", "expected", "checkpointed", "kept", "without_graph", "not_called")
    counts = {key: Counter[str]() for key in keys}
    wrong: dict[str, list[str]] = {}
    for key, layer in watch.layers.items():
        forward, recomputed, plain = (c[key] for c in (function.forward, function.recomputed, function.plain))
        kept = function.unrecomputed[key]
        counts["layers"][layer.component] += 1
        counts["expected"][layer.component] += layer.needs_graph
        if kept:
            counts["kept"][layer.component] += 1
        if forward:
            counts["checkpointed"][layer.component] += recomputed == forward
        elif plain:
            counts["without_graph"][layer.component] += 1
        elif not kept:
            counts["not_called"][layer.component] += 1
        ran = layer.container in watch.ran and not function.compiled and not kept
        problem = judge(layer, forward, recomputed, plain, ran)
        if problem:
            wrong.setdefault(problem, []).append(layer.name)
    problems = [f"{len(names)} layers {how}, e.g. {names[0]}" for how, names in wrong.items()]
    calls = function.forward.total()
    if function.host_inputs is not None and function.host_inputs.moved < calls:
        stayed = calls - function.host_inputs.moved
        problems.append(f"{stayed} of {calls} inputs of layers stayed on the device")
    components = {key: dict(value) for key, value in counts.items()}
    return {**components, "compiled": function.compiled, "problems": problems}


def judge(layer: Layer, forward: int, recomputed: int, plain: int, ran: bool) -> str:
    """Return what is wrong with a layer's calls, "" if nothing is.

    Args:
        forward, recomputed, plain: calls through the checkpoint, run again by backward, without a graph.
        ran: True where the module that holds the layer ran, so that a call of the layer would have been seen.
    """
    if forward and not layer.needs_graph:
        return "built a graph although nothing before them trains (an input was made to require a gradient)"
    # Some models never use the last blocks of their tower, so backward does not come there.
    if forward and recomputed != forward and (recomputed or layer.component == "text"):
        return "checkpointed, but backward recomputed them less often"
    if plain and layer.needs_graph and not layer.only_with_images:
        return "run without a graph although backward must pass through them"
    if layer.needs_graph and ran and not forward and not plain:
        return "run past their checkpointing, which would keep all their activations"
    return ""
