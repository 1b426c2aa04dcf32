"""The checkpointable layers of a model: which there are, where they belong, which take part in backward."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

Component = Literal["text", "projector", "vision"]

# Names that Transformers' models give the attribute that holds a tower or the bridge from it to the text
# model. Whole path parts are compared, so a text layer called `visualise` is not a tower.
VISION = {"visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens", "audio_tower"}
PROJECTOR = {
    "merger",
    "deepstack_merger_list",
    "multi_modal_projector",
    "connector",
    "aligner",
    "mlp1",
    "mlp_AR",
}
# What wrappers put into a path: FSDP1, FSDP's and torch's own activation checkpointing, compile, trl.
WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "pretrained_model"}


@dataclass(frozen=True)
class Layer:
    """One GradientCheckpointingLayer.

    Attributes:
        name: dotted path without the parts that wrappers add.
        component: text, projector or vision (an audio tower counts as one).
        needs_graph: True where a trainable parameter lies in it or upstream of it, so that its backward runs.
        only_with_images: True where that is so only because a tower or the projector trains; a batch without
            an image then needs no graph here.
        container: ``id`` of the module whose forward calls this layer.
    """

    name: str
    component: Component
    needs_graph: bool
    only_with_images: bool
    container: int


def component_of(name: str) -> Component:
    """Place a dotted module or parameter path."""
    parts = set(name.split("."))
    if parts & PROJECTOR:
        return "projector"
    return "vision" if parts & VISION else "text"


def plain_name(name: str) -> str:
    """Drop what PEFT, FSDP and other wrappers add to a dotted path."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    return name.removeprefix("module.").removeprefix("base_model.model.")


def checkpointable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, layer) of every GradientCheckpointingLayer, in the order of registration."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            yield name, module


def plan(model: nn.Module) -> dict[int, Layer]:
    """Say for each checkpointable layer whether backward passes through it.

    Data flows towers -> projector -> text, and within each in the order of registration. Backward reaches a
    layer when something trainable lies in it or before it. Towers (vision, audio) do not feed each other.

    Returns:
        ``id(layer)`` -> Layer. Shapes and devices do not matter: a model on the meta device is planned alike.
    """
    modules = dict(model.named_modules())
    layers = {id(module): name for name, module in checkpointable(model)}
    trains: dict[tuple[Component, str], bool] = defaultdict(bool)
    own: dict[int, bool] = {}  # something trainable in the layer or before it in its part of the model
    for name, module in modules.items():
        part = _part_of(plain_name(name))
        parameters = module.parameters() if id(module) in layers else module.parameters(recurse=False)
        trains[part] |= any(parameter.requires_grad for parameter in parameters)
        if id(module) in layers:
            own[id(module)] = trains[part]
    tower = any(trains[part] for part in trains if part[0] == "vision")
    bridge = tower or any(trains[part] for part in trains if part[0] == "projector")
    upstream: dict[Component, bool] = {"vision": False, "projector": tower, "text": bridge}
    found = {}
    for key, name in layers.items():
        component = component_of(plain_name(name))
        found[key] = Layer(
            name=plain_name(name),
            component=component,
            needs_graph=own[key] or upstream[component],
            only_with_images=component == "text" and not own[key] and upstream["text"],
            container=id(_container(modules, name)),
        )
    return found


def _part_of(name: str) -> tuple[Component, str]:
    """Return the component of a path and, for a tower or a projector, the path of its root."""
    component = component_of(name)
    roots = {"text": set[str](), "projector": PROJECTOR, "vision": VISION}[component]
    parts = name.split(".")
    depth = next((index + 1 for index, part in enumerate(parts) if part in roots), 0)
    return component, ".".join(parts[:depth])


def _container(modules: dict[str, nn.Module], name: str) -> nn.Module:
    """Return the module above a layer whose forward runs it: not a list, not a wrapper of the layer."""
    above = name
    while above:
        above = above.rpartition(".")[0]
        module = modules[above]
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and plain_name(above) != plain_name(name):
            return module
    return modules[""]
