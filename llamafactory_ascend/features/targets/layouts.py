"""Where a model keeps its components and its blocks: a table of exact paths, and discovery for the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.layers import PROJECTOR, VISION


@dataclass(frozen=True)
class Layout:
    """Paths on the model object, as a checkpoint spells them.

    Attributes:
        roots: component -> the modules that make it up; the longest root that fits a path decides.
        blocks: component -> the list of its numbered blocks, for components that have one.
    """

    roots: Mapping[str, tuple[str, ...]]
    blocks: Mapping[str, str] = field(default_factory=dict)

    def component_of(self, path: str) -> str | None:
        """Return the component that a path belongs to, None where it is in no root."""
        found = [
            (len(root), component)
            for component, roots in self.roots.items()
            for root in roots
            if not root or path == root or path.startswith(f"{root}.")
        ]
        return max(found)[1] if found else None

    def block_of(self, component: str, path: str) -> int | None:
        """Return the number of the block that a path lies in, None outside the blocks."""
        prefix = f"{self.blocks.get(component)}."
        number = path.removeprefix(prefix).partition(".")[0] if path.startswith(prefix) else ""
        return int(number) if number.isdigit() else None


TEXT = Layout({"text": ("",)}, {"text": "model.layers"})


def _with_vision(*projector: str) -> Layout:
    return Layout(
        {
            "text": ("model.language_model", "lm_head"),
            "projector": tuple(f"model.visual.{name}" for name in projector),
            "vision": ("model.visual",),
        },
        {"text": "model.language_model.layers", "vision": "model.visual.blocks"},
    )


# `model_type` of the config -> layout
LAYOUTS: Mapping[str, Layout] = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), TEXT),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"), _with_vision("merger")),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _with_vision("merger", "deepstack_merger_list")),
}
OTHER_SENSES = ("vision_config", "audio_config", "visual")  # keys of a config whose model has a tower


def layout_of(model: nn.Module, paths: Mapping[str, nn.Module]) -> Layout:
    """Return the layout of a model: that of the table if all its paths are there, else what is found.

    Args:
        paths: the model's modules by their plain path.

    Raises:
        AscendError: the config tells of a tower, and none is found.
    """
    config: Any = getattr(model, "config", None)
    model_type = str(getattr(config, "model_type", type(model).__name__))
    known = LAYOUTS.get(model_type)
    if known and set(known.blocks.values()) <= set(paths):
        return known
    found = discover(paths)
    senses = [key for key in OTHER_SENSES if getattr(config, key, None) is not None]
    if senses and not found.roots.get("vision"):
        raise AscendError(
            f"`ascend.targets`: the config of {model_type} has `{senses[0]}`, but no module of the model has "
            f"the name of a tower that is known ({', '.join(sorted(VISION))})",
            "remove `ascend.targets` and use `lora_target`",
        )
    return found


def discover(paths: Mapping[str, nn.Module]) -> Layout:
    """Find towers and projectors by the names that Transformers gives them; all the rest is text.

    The blocks of a component are its largest list of layers. Two towers (vision and audio) have none: a
    number would mean both.
    """
    roots: dict[str, list[str]] = {"text": [""], "projector": [], "vision": []}
    for path in paths:
        leaf = path.rpartition(".")[2]
        component = "projector" if leaf in PROJECTOR else "vision" if leaf in VISION else ""
        if component and not any(path.startswith(f"{root}.") for root in roots[component]):
            roots[component].append(path)
    layout = Layout({component: tuple(found) for component, found in roots.items() if found})
    largest: dict[str, tuple[int, str]] = {}
    for path, module in paths.items():
        owner = layout.component_of(path)
        if isinstance(module, nn.ModuleList) and owner in ("text", "vision"):
            size = sum(1 for _ in module.modules())  # not its parameters: ZeRO-3 has emptied them
            largest[owner] = max(largest.get(owner, (0, "")), (size, path))
    if len(roots["vision"]) > 1:
        largest.pop("vision", None)
    return Layout(layout.roots, {component: path for component, (_size, path) in largest.items()})
