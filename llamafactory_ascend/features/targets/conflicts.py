"""The host's settings beside the targets: those that contradict them, and those that do nothing."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from llamafactory_ascend.errors import AscendError

if TYPE_CHECKING:
    from llamafactory_ascend.run import Arguments

ADAPTERS = ("lora", "oft")
FREEZES = {
    "freeze_language_model": "text",
    "freeze_multi_modal_projector": "projector",
    "freeze_vision_tower": "vision",
}
ONLY_FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
REMOVE = "remove `ascend.targets`"


def refuse(arguments: "Arguments", given: Collection[str]) -> None:
    """Stop a run whose other settings say something else than `ascend.targets`, before its model is loaded.

    Args:
        given: the host's keys that the user wrote; a default contradicts nothing.

    Raises:
        AscendError: another method, another choice of modules.
    """
    finetuning = arguments.finetuning
    kind = finetuning.finetuning_type
    if kind not in ADAPTERS:
        whole = [name for name in ("galore", "apollo", "badam") if getattr(finetuning, f"use_{name}", False)]
        line = f"`use_{whole[0]}: true`" if whole else f"`finetuning_type: {kind}`"
        raise AscendError(
            f"`ascend.targets` says where adapters go, and {line} trains the model's own weights",
            f"set `finetuning_type: lora` or `oft`, or {REMOVE}",
        )
    if finetuning.use_llama_pro:
        raise AscendError(
            "`use_llama_pro: true` chooses the expanded blocks itself, `ascend.targets` chooses modules",
            f"remove `use_llama_pro`, or {REMOVE}",
        )
    if arguments.model.use_unsloth:
        raise AscendError(
            "Unsloth places its adapters itself, so `ascend.targets` cannot be kept",
            f"remove `use_unsloth`, or {REMOVE}",
        )
    for key in ("lora_target", "oft_target"):
        if key in given:
            value = ",".join(getattr(finetuning, key))
            raise AscendError(
                f"`{key}: {value}` and `ascend.targets` both choose the modules to adapt",
                f"remove `{key}` (or {REMOVE})",
            )


def idle_flags(
    finetuning: Any, given: Collection[str], trained: Collection[str], origin: str
) -> Iterator[str]:
    """Yield a sentence for each freeze flag that the user wrote and that is not what happens.

    Args:
        finetuning: the host's arguments; with LoRA or OFT.
        trained: components with something trainable.
        origin: what chose the modules, as in the report.
    """
    for flag, component in FREEZES.items():
        if flag not in given:
            continue
        frozen = bool(getattr(finetuning, flag))
        if frozen and component in trained:
            ours = origin == "ascend.targets"
            why = f"{origin} names modules of it and wins" if ours else "the host does not heed it"
            yield f"`{flag}: true` has no effect: {component} is trained, {why}"
        elif not frozen and component not in trained:
            yield f"`{flag}: false` trains nothing: {origin} reaches no module of {component}"
    if not finetuning.use_llama_pro:
        for flag in ONLY_FREEZE:
            if flag in given:
                yield f"`{flag}` has no effect with `finetuning_type: {finetuning.finetuning_type}`"
