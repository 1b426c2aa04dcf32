"""The checkpointable layers of a model: which there are, where they belong, which take part in backward."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

Component = Literal["text", "projector", "vision"]

# Names that Transformers' models give the attribute that holds the tower or the bridge from it to the text
# model. Whole path parts are compared, so a text layer called `visualise` is not a tower.
VISION = {"visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens", "audio_tower"}
PROJECTOR = {"merger", "deepstack_merger_list", "multi_modal_projector", "mlp1", "connector", "aligner", "mlp_AR"}
# What wrappers put into a path: PEFT, DDP, FSDP1, FSDP's and torch's own activation checkpointing, compile, trl.
WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "pretrained_model"}


@dataclass(frozen=True)
class Layer:
    """One GradientCheckpointingLayer.

    Attributes:
        name: dotted path without the parts that wrappers add.
        component: text, projector or vision.
        needs_graph: True where a trainable parameter lies in it or upstream of it, so that its backward runs.
        only_with_images: True where that is so only because the vision tower or the projector trains; a batch
            without an image then needs no graph here.
    """

    name: str
    component: Component
    needs_graph: bool
    only_with_images: bool


def component_of(name: str) -> Component:
    """Place a dotted module or parameter path."""
    parts = set(name.split("."))
    if parts & PROJECTOR:
        return "projector"
    return "vision" if parts & VISION else "text"


def plain_name(name: str) -> str:
    """Drop what PEFT, FSDP and other wrappers add to a dotted path."""
    name = name.removeprefix("module.").removeprefix("base_model.model.")
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def checkpointable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (plain name, layer) of every GradientCheckpointingLayer, in the order of registration."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            yield plain_name(name), module


def plan(model: nn.Module) -> dict[int, Layer]:
    """Say for each checkpointable layer whether backward passes through it.

    Data flows vision -> projector -> text, and within a component in the order of registration. Backward
    reaches a layer when something trainable lies in it or before it.

    Returns:
        ``id(layer)`` -> Layer. Shapes and devices do not matter: a model on the meta device is planned alike.
    """
    layers = {id(module): name for name, module in checkpointable(model)}
    trains: dict[Component, bool] = {"text": False, "projector": False, "vision": False}
    reached: dict[int, tuple[Component, bool]] = {}
    for name, module in model.named_modules():
        component = component_of(plain_name(name))
        own = module.parameters() if id(module) in layers else module.parameters(recurse=False)
        trains[component] |= any(parameter.requires_grad for parameter in own)
        if id(module) in layers:
            reached[id(module)] = (component, trains[component])
    upstream = {"vision": False, "projector": trains["vision"], "text": trains["vision"] or trains["projector"]}
    return {
        key: Layer(layers[key], component, own or upstream[component], component == "text" and not own and upstream["text"])
        for key, (component, own) in reached.items()
    }
