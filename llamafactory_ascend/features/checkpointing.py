"""Gradient checkpointing: every layer that takes part in backward, never re-entrant, no graph elsewhere.

Stock checkpoints only layers that own a trainable parameter, re-entrantly. With LoRA on the attention of a
hybrid that leaves three layers of four with all their activations. Non-re-entrant checkpointing needs no
input that requires a gradient, so the hooks that put one there are removed, and layers below the first
adapter (or a frozen vision tower) run without any graph.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llamafactory_ascend import log
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.layers import Layer, plan
from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.run import Arguments, Run

# Transformers and PEFT register these on the input embeddings, the former once per call and forgetting the
# handle of the call before, so they are found by name.
INPUT_GRAD_HOOKS = {"make_inputs_require_grads", "make_inputs_require_grad"}


class LayerCheckpointing:
    """The function Transformers calls in place of a layer: ``f(function, *args)``.

    Attributes:
        forward, recomputed, plain: calls of each layer (by ``id``) in the first step: checkpointed forward,
            recomputation in backward, run without a graph.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Keep what goes to torch's ``checkpoint`` besides ``use_reentrant`` (e.g. ``context_fn``)."""
        self.kwargs = {key: value for key, value in kwargs.items() if key != "use_reentrant"}
        self.counting = True
        self.forward: Counter[int] = Counter()
        self.recomputed: Counter[int] = Counter()
        self.plain: Counter[int] = Counter()

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layer = owner(function)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if not needs_graph(layer, (args, kwargs, getattr(function, "keywords", None))):
            self.plain[id(layer)] += self.counting
            return function(*args, **kwargs)
        if not self.counting:
            return self._checkpoint(function, args, kwargs)

        calls = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            (self.recomputed if calls else self.forward)[id(layer)] += 1
            calls += 1
            return function(*args, **kwargs)

        return self._checkpoint(counted, args, kwargs)

    def _checkpoint(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(function, *args, use_reentrant=False, **self.kwargs, **kwargs)


def owner(function: Callable[..., Any]) -> nn.Module:
    """Return the layer whose bound method (perhaps inside a partial) was passed."""
    return getattr(function, "func", function).__self__  # type: ignore[union-attr,no-any-return]


def needs_graph(layer: nn.Module, inputs: Any) -> bool:
    """True where autograd would record anything in this layer: a parameter or an input requires a gradient."""
    return any(p.requires_grad for p in layer.parameters()) or any(t.requires_grad for t in _tensors(inputs))


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def enable(model: nn.Module, **kwargs: Any) -> LayerCheckpointing:
    """Checkpoint every layer of a model through one LayerCheckpointing, and drop the input-gradient hooks.

    Args:
        kwargs: for torch's ``checkpoint``; ``use_reentrant`` is not heeded.
    """
    function = installed(model) or LayerCheckpointing(**kwargs)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = function
    remove_input_grad_hooks(model)
    return function


def installed(model: nn.Module) -> LayerCheckpointing | None:
    """Return the LayerCheckpointing that a model uses."""
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if isinstance(function, LayerCheckpointing):
            return function
    return None


def disturbed(model: nn.Module, function: LayerCheckpointing) -> list[str]:
    """Return the names of modules whose checkpointing somebody switched off or replaced."""
    return [
        name
        for name, module in model.named_modules()
        if hasattr(module, "gradient_checkpointing")
        and not (module.gradient_checkpointing and getattr(module, "_gradient_checkpointing_func", None) is function)
    ]


def remove_input_grad_hooks(model: nn.Module) -> int:
    """Remove the hooks that make embeddings' outputs require a gradient; only re-entrance needs them.

    Returns:
        How many there were.
    """
    removed = 0
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "") in INPUT_GRAD_HOOKS:
                del module._forward_hooks[key]
                removed += 1
    return removed


def double_checkpointing(arguments: "Arguments") -> str:
    """Return the line of the recipe or the environment that also turns FSDP's own checkpointing on, or ""."""
    import os

    if arguments.model.disable_gradient_checkpointing or not arguments.training.do_train:
        return ""
    config = arguments.training.fsdp_config or {}
    if arguments.training.fsdp and isinstance(config, dict) and config.get("activation_checkpointing"):
        return "fsdp_config.activation_checkpointing: true"
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true":
        return "FSDP_ACTIVATION_CHECKPOINTING=true (fsdp_activation_checkpointing in the accelerate config)"
    return ""


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    if run.settings.checkpointing == "off":
        run.decide("checkpointing", "left to the host", "`ascend.checkpointing: off`")
        return
    twice = double_checkpointing(arguments)
    if twice:
        raise AscendError(
            f"activations would be recomputed twice: `{twice}` beside gradient checkpointing",
            "remove that line; or keep it and set `disable_gradient_checkpointing: true`",
            "https://github.com/hiyouga/LLaMA-Factory/issues/9064",
        )
    if arguments.model.disable_gradient_checkpointing:
        run.decide("checkpointing", "none", "`disable_gradient_checkpointing: true`")
    elif arguments.model.use_unsloth_gc or arguments.model.use_unsloth:
        run.decide("checkpointing", "left to the host", "Unsloth brings its own checkpointing")
    else:
        run.decide("checkpointing", "every layer in backward, non-re-entrant", "`ascend.checkpointing: full`")


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    if installed(trainer.model) is None:
        return []
    from llamafactory_ascend.features.checkpointing_proof import CheckpointingProof

    return [CheckpointingProof(run)]


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `checkpointing`: what the first step of this rank did, beside the plan; null before it or if off."""
    return {"checkpointing": run.facts.get("checkpointing")}


@hookimpl
def ascend_after_model(run: "Run", model: nn.Module) -> None:
    if installed(model) is not None:
        remove_input_grad_hooks(model)
        announce(model)


def announce(model: nn.Module) -> None:
    """Say once how many layers will be checkpointed and how many run without a graph."""
    layers: list[Layer] = list(plan(model).values())
    graph = sum(layer.needs_graph for layer in layers)
    log.info(f"checkpointing: {graph} of {len(layers)} layers take part in backward; the others run without a graph")
