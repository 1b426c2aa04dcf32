"""Gradient checkpointing: every layer that takes part in backward, never re-entrant, no graph elsewhere.

Stock checkpoints only layers that own a trainable parameter, re-entrantly. With LoRA on the attention of a
hybrid that leaves three layers of four with all their activations. Non-re-entrant checkpointing needs no
input that requires a gradient, so the hooks that put one there are removed, and layers below the first
adapter (or a frozen vision tower) run without any graph. `auto` leaves the last layers un-recomputed where
memory allows (``checkpointing_auto``), `offload` moves the layers' inputs to the host
(``checkpointing_offload``).
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llamafactory_ascend import log
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.checkpointing_conflicts import (
    against,
    parameters_come_and_go,
    refuse_double_checkpointing,
)
from llamafactory_ascend.features.layers import plan
from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.features.checkpointing_offload import HostInputs
    from llamafactory_ascend.run import Arguments, Run

OURS = "every layer in backward, non-re-entrant"
# Transformers and PEFT register these on the input embeddings, the former once per call and forgetting the
# handle of the call before, so they are found by name.
INPUT_GRAD_HOOKS = {"make_inputs_require_grads", "make_inputs_require_grad"}


class LayerCheckpointing:
    """The function Transformers calls in place of a layer: ``f(function, *args)``.

    Attributes:
        kwargs: what goes to torch's ``checkpoint`` besides ``use_reentrant`` (e.g. ``context_fn``).
        kept: ``id`` of the layers that run past the checkpoint, with all their activations.
        meter: while not None, returns the bytes allocated now, and is asked around each recomputation.
        saved_bytes: by ``id`` of the layer, what the recomputations that were metered left allocated: what
            the layer would save for backward if it were kept.
        host_inputs: takes the layers' inputs to the host between forward and backward, if not None.
        forward, recomputed, plain, unrecomputed: calls by ``id`` of the layer while counting: those that
            ran through the checkpoint, those of them that backward ran again, those that needed no graph,
            those of kept layers. Ids and numbers only: nothing here keeps a module or a tensor alive.
        compiled: True once torch.compile has traced a layer; the calls of a compiled graph cannot be counted.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs: dict[str, Any] = {}
        self.adopt(kwargs)
        self.kept: frozenset[int] = frozenset()
        self.meter: Callable[[], int] | None = None
        self.saved_bytes: Counter[int] = Counter()
        self.host_inputs: HostInputs | None = None
        self.counting = self.compiled = False
        self.forward: Counter[int] = Counter()
        self.recomputed: Counter[int] = Counter()
        self.plain: Counter[int] = Counter()
        self.unrecomputed: Counter[int] = Counter()

    def adopt(self, kwargs: dict[str, Any]) -> None:
        """Take over arguments for torch's ``checkpoint``; ``use_reentrant`` is not heeded, others stay."""
        self.kwargs |= {key: value for key, value in kwargs.items() if key != "use_reentrant"}

    def start_counting(self) -> None:
        self.forward, self.recomputed, self.plain = Counter(), Counter(), Counter()
        self.unrecomputed = Counter()
        if self.host_inputs is not None:
            self.host_inputs.moved = 0
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
        if id(layer) in self.kept:
            if counting:
                self.unrecomputed[id(layer)] += 1
            return function(*args, **kwargs)
        observed = counting or self.meter is not None
        with self.host_inputs.saving(args) if self.host_inputs is not None else nullcontext():
            return self._checkpoint(
                self._observed(function, id(layer), counting) if observed else function, args, kwargs
            )

    def _observed(self, function: Callable[..., Any], key: int, counting: bool) -> Callable[..., Any]:
        calls, meter = 0, self.meter

        def observed(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if counting and calls <= 2:  # a graph that is kept for a second backward is recomputed again
                (self.forward if calls == 1 else self.recomputed)[key] += 1
            if meter is None or calls != 2:
                return function(*args, **kwargs)
            before = meter()
            try:
                return function(*args, **kwargs)
            finally:  # torch ends a recomputation by an exception, as soon as it has what backward needs
                self.saved_bytes[key] += meter() - before

        # Where the tensors are must stay visible to _checkpoint.
        return (
            partial(observed, **keywords) if (keywords := getattr(function, "keywords", None)) else observed
        )

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


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    """Decide who checkpoints, and refuse what contradicts a request.

    Raises:
        AscendError: with the lines that contradict each other.
    """
    for name in ("checkpointing", "checkpointing budget"):
        run.facts.pop(name, None)  # of an earlier training in this process
    if not arguments.training.do_train:
        return
    mode = run.settings.checkpointing
    if "memory_budget" in run.settings.model_fields_set and mode != "auto":
        raise AscendError(
            f"`ascend.memory_budget` means nothing with `ascend.checkpointing: {mode}`",
            "write `checkpointing: auto` beside it, or remove it",
        )
    if mode in ("auto", "offload") and (reason := against(mode, arguments)):
        raise AscendError(f"`ascend.checkpointing: {mode}`: {reason}", "write `ascend.checkpointing: full`")
    if mode == "off":
        run.decide("checkpointing", "left to the host", "`ascend.checkpointing: off`")
    elif arguments.model.disable_gradient_checkpointing:
        if "checkpointing" in run.settings.model_fields_set:
            raise AscendError(
                f"`disable_gradient_checkpointing: true` contradicts `ascend.checkpointing: {mode}`",
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
        run.decide("checkpointing", OURS, f"`ascend.checkpointing: {mode}`")
        if (arguments.training.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            key = "gradient_checkpointing_kwargs.use_reentrant"
            run.find("note", "checkpointing", f"`{key}: true` is not heeded")


@hookimpl
def ascend_after_model(run: "Run", model: nn.Module) -> None:
    function = installed(model)
    if function is not None:
        remove_input_grad_hooks(model)  # PEFT has put them back
        if run.settings.checkpointing == "offload":
            from llamafactory_ascend.features.checkpointing_offload import HostInputs

            function.host_inputs = HostInputs()
            run.decide("inputs of layers", "in pinned host memory", "`ascend.checkpointing: offload`")
        layers = list(plan(model).values())
        graph = sum(layer.needs_graph for layer in layers)
        log.info(
            f"checkpointing: {graph} of {len(layers)} layers take part in backward; no graph for the rest"
        )


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    decision, mode = run.decisions.get("checkpointing"), run.settings.checkpointing
    if decision is None or run.arguments is None:
        return []
    if decision.choice == OURS and run.arguments.model.disable_gradient_checkpointing:
        run.decide("checkpointing", "none", "the host switched it off for this model")  # which cannot
        decision = run.decisions["checkpointing"]
    if decision.choice != OURS:
        if mode in ("auto", "offload"):
            what = f"`ascend.checkpointing: {mode}`: it is {decision.choice}: {decision.reason}"
            raise AscendError(what, "leave `ascend.checkpointing` out")
        return []
    from llamafactory_ascend.features.checkpointing_proof import CheckpointingProof

    proof = CheckpointingProof(run)
    if mode != "auto":
        return [proof]
    from llamafactory_ascend.features.checkpointing_auto import CheckpointingAuto

    return [proof, CheckpointingAuto(run, proof)]


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `checkpointing`: what the step that was counted last did on this rank, beside the plan, and what
    `auto` measured; null before the first step or if off."""
    section, budget = run.facts.get("checkpointing"), run.facts.get("checkpointing budget")
    return {"checkpointing": {**section, "budget": budget} if section and budget else section}
