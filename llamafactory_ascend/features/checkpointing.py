"""Gradient checkpointing: every layer that takes part in backward, never re-entrant, no graph elsewhere.

Stock checkpoints only layers that own a trainable parameter, re-entrantly. With LoRA on the attention of a
hybrid that leaves three layers of four with all their activations. Non-re-entrant checkpointing needs no
input that requires a gradient, so the hooks that put one there are removed, and layers below the first
adapter (or a frozen vision tower) run without any graph.
"""

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llamafactory_ascend import log
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.layers import plan
from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.run import Arguments, Run

OURS = "every layer in backward, non-re-entrant"
# Transformers and PEFT register these on the input embeddings, the former once per call and forgetting the
# handle of the call before, so they are found by name.
INPUT_GRAD_HOOKS = {"make_inputs_require_grads", "make_inputs_require_grad"}
TRUE = {"y", "yes", "t", "true", "on", "1"}  # what accelerate takes for true in the environment


class LayerCheckpointing:
    """The function Transformers calls in place of a layer: ``f(function, *args)``.

    Attributes:
        kwargs: what goes to torch's ``checkpoint`` besides ``use_reentrant`` (e.g. ``context_fn``).
        forward, recomputed, plain: calls by ``id`` of the layer while counting: those that ran through the
            checkpoint, those of them that backward ran again, those that needed no graph. Ids and numbers
            only: nothing here keeps a module or a tensor alive.
        compiled: True once torch.compile has traced a layer; the calls of a compiled graph cannot be counted.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs: dict[str, Any] = {}
        self.adopt(kwargs)
        self.counting = self.compiled = False
        self.forward: Counter[int] = Counter()
        self.recomputed: Counter[int] = Counter()
        self.plain: Counter[int] = Counter()

    def adopt(self, kwargs: dict[str, Any]) -> None:
        """Take over arguments for torch's ``checkpoint``; ``use_reentrant`` is not heeded, others stay."""
        self.kwargs |= {key: value for key, value in kwargs.items() if key != "use_reentrant"}

    def start_counting(self) -> None:
        self.forward, self.recomputed, self.plain = Counter(), Counter(), Counter()
        self.counting = True

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        layer = owner(function)
        if torch.compiler.is_compiling():
            self.compiled = True
            counting = False  # and not read from self: a graph would be compiled again when it changes
        else:
            counting = self.counting
        if layer is not None and not needs_graph(layer, (args, kwargs, getattr(function, "keywords", None))):
            if counting:
                self.plain[id(layer)] += 1
            return function(*args, **kwargs)
        return self._checkpoint(self._counted(function, id(layer)) if counting else function, args, kwargs)

    def _counted(self, function: Callable[..., Any], key: int) -> Callable[..., Any]:
        calls = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls <= 2:  # a graph that is kept for a second backward is recomputed again
                (self.forward if calls == 1 else self.recomputed)[key] += 1
            return function(*args, **kwargs)

        # Where the tensors are must stay visible to _checkpoint.
        return partial(counted, **keywords) if (keywords := getattr(function, "keywords", None)) else counted

    def _checkpoint(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        keywords = {**getattr(function, "keywords", {}), **kwargs}
        if _any_tensor(args, _is_anything) or not _any_tensor(keywords, _is_anything):
            return checkpoint(function, *args, use_reentrant=False, **self.kwargs, **kwargs)
        # torch keeps the random state of the devices it finds among the positional arguments: with none
        # there, dropout on the device would draw another mask when backward runs the layer again.
        return checkpoint(_call, function, args, keywords, use_reentrant=False, **self.kwargs)


def _call(function: Callable[..., Any], args: Any, keywords: dict[str, Any]) -> Any:
    return function(*args, **keywords)


def owner(function: Callable[..., Any]) -> nn.Module | None:
    """Return the layer whose bound method, perhaps in a partial, was passed; None for a plain function."""
    found = getattr(getattr(function, "func", function), "__self__", None)
    return found if isinstance(found, nn.Module) else None


def needs_graph(layer: nn.Module, inputs: Any) -> bool:
    """True where autograd would record anything in this layer: an input or a parameter requires a gradient.

    Inputs come first: above the first trainable parameter the hidden states answer in 2 us (on a CPU), where
    walking the parameters of a Qwen3.5 layer takes 25. Nothing is remembered from call to call, because
    block-wise optimizers change ``requires_grad`` while training.
    """
    return _any_tensor(inputs, _requires_grad) or any(map(_requires_grad, layer.parameters()))


def _any_tensor(value: Any, test: Callable[[torch.Tensor], bool]) -> bool:
    if isinstance(value, torch.Tensor):
        return test(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return False
    return any(_any_tensor(item, test) for item in value)


def _requires_grad(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


def _is_anything(tensor: torch.Tensor) -> bool:
    return True


def enable(model: nn.Module, **kwargs: Any) -> LayerCheckpointing:
    """Checkpoint every layer of a model through one LayerCheckpointing, and drop the input-gradient hooks.

    Args:
        kwargs: for torch's ``checkpoint``; ``use_reentrant`` is not heeded.
    """
    function = installed(model) or LayerCheckpointing()
    function.adopt(kwargs)
    module: Any
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
        and not (
            module.gradient_checkpointing
            and getattr(module, "_gradient_checkpointing_func", None) is function
        )
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
    """Return what also turns FSDP's own checkpointing on, as the user wrote it, or "".

    The Trainer takes ``fsdp_config`` (it has dropped the prefix ``fsdp_`` from its keys by now) before the
    environment that ``accelerate launch`` makes of its config.
    """
    training = arguments.training
    if not (training.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in TRUE):
        return ""
    config = training.fsdp_config or {}
    if "activation_checkpointing" in config:
        value = str(config["activation_checkpointing"]).lower()
        key = "activation_checkpointing (or fsdp_activation_checkpointing)"
        return f"fsdp_config: {key}: {value}" if config["activation_checkpointing"] else ""
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() in TRUE:
        value = os.environ["FSDP_ACTIVATION_CHECKPOINTING"]
        key = "fsdp_activation_checkpointing in the accelerate config"
        return f"FSDP_ACTIVATION_CHECKPOINTING={value} ({key})"
    return ""


def parameters_come_and_go() -> bool:
    """True under DeepSpeed ZeRO-3, which empties each parameter in place after use.

    torch keeps the frozen parameters that a recomputed layer needs by reference, so backward finds them empty
    (a CheckpointError in the first step of every LoRA run). Re-entrance does not keep them.
    """
    from transformers.integrations import is_deepspeed_zero3_enabled

    return bool(is_deepspeed_zero3_enabled())


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    run.facts.pop("checkpointing", None)  # of an earlier training in this process
    if not arguments.training.do_train:
        return
    if run.settings.checkpointing == "off":
        run.decide("checkpointing", "left to the host", "`ascend.checkpointing: off`")
    elif arguments.model.disable_gradient_checkpointing:
        if "checkpointing" in run.settings.model_fields_set:
            raise AscendError(
                "`disable_gradient_checkpointing: true` contradicts `ascend.checkpointing: full`",
                "remove one of the two lines",
            )
        own = arguments.training.gradient_checkpointing
        choice = "left to the Trainer (`gradient_checkpointing: true`)" if own else "none"
        run.decide("checkpointing", choice, "`disable_gradient_checkpointing: true`")
    elif arguments.model.use_unsloth_gc or arguments.model.use_unsloth:
        run.decide("checkpointing", "left to the host", "Unsloth brings its own checkpointing")
    elif parameters_come_and_go():
        what = "DeepSpeed ZeRO-3 cannot be checkpointed without re-entrance"
        run.decide("checkpointing", "left to the host", what)
        run.miss("checkpointing", f"{what}: left to the host", "use FSDP2 or ZeRO-2 for less memory")
    else:
        refuse_double_checkpointing(arguments)
        run.decide("checkpointing", OURS, "`ascend.checkpointing: full`")
        if (arguments.training.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            key = "gradient_checkpointing_kwargs.use_reentrant"
            run.find("note", "checkpointing", f"`{key}: true` is not heeded")


def refuse_double_checkpointing(arguments: "Arguments") -> None:
    """Stop a run that would recompute every activation twice, before its model is loaded.

    Raises:
        AscendError: FSDP's own activation checkpointing is on as well.
    """
    line = double_checkpointing(arguments)
    if line:
        raise AscendError(
            f"activations would be recomputed twice: `{line}` beside gradient checkpointing",
            "remove that line; or keep it and set `disable_gradient_checkpointing: true`",
            "https://github.com/hiyouga/LLaMA-Factory/issues/9064",
        )


@hookimpl
def ascend_after_model(run: "Run", model: nn.Module) -> None:
    if installed(model) is not None:
        remove_input_grad_hooks(model)  # PEFT has put them back
        layers = list(plan(model).values())
        graph = sum(layer.needs_graph for layer in layers)
        log.info(
            f"checkpointing: {graph} of {len(layers)} layers take part in backward; no graph for the rest"
        )


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    decision = run.decisions.get("checkpointing")
    if decision is None or decision.choice != OURS or run.arguments is None:
        return []
    if run.arguments.model.disable_gradient_checkpointing:  # the host sets it for models that cannot
        run.decide("checkpointing", "none", "the host switched it off for this model")
        return []
    from llamafactory_ascend.features.checkpointing_proof import CheckpointingProof

    return [CheckpointingProof(run)]


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `checkpointing`: what this rank's first step did, beside the plan; null before it or if off."""
    return {"checkpointing": run.facts.get("checkpointing")}
