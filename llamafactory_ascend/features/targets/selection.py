"""Choosing modules: whole parts of exact paths, linear layers alone, and a reason for what is left out."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.targets.inventory import Inventory, ends_with
from llamafactory_ascend.features.targets.request import (
    EVERY_BLOCK,
    SETS,
    Group,
    Targets,
    block_numbers,
)

# set -> the attributes of a block that hold its modules (`all`: every one)
HOLDERS: Mapping[str, tuple[str, ...]] = {
    "attention": ("self_attn", "attn", "attention", "self_attention"),
    "mlp": ("mlp", "feed_forward", "ffn"),
    "deltanet": ("linear_attn",),
}
# DeltaNet's gates: one output per head.
GATES = ("in_proj_a", "in_proj_b", "in_proj_ba")
# Too narrow for an adapter to be of use, or to be served: no set holds them.
ONLY_BY_NAME = (*GATES, "gate", "shared_expert_gate")
NEAREST = 3


@dataclass(frozen=True)
class Match:
    """What one pattern chose.

    Attributes:
        blocks: as the recipe says them, "" for all.
        modules: plain paths of linear layers, in the model's order.
        left_out: sentences about what has such a name and is not adapted.
    """

    component: str
    pattern: str
    blocks: str
    modules: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.component} {self.pattern}" + (f" (blocks {self.blocks})" if self.blocks else "")


@dataclass(frozen=True)
class Selection:
    """What a recipe chose.

    Attributes:
        matches: one per pattern and component.
        names: plain paths of all modules to adapt, once each, in the model's order.
        warnings: sentences about what was chosen and will give trouble later.
    """

    matches: tuple[Match, ...]
    names: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def select(model: nn.Module, targets: Targets) -> Selection:
    """Choose the modules that a recipe names, all of them by their whole path.

    Args:
        model: with or without adapters, on any device; names and shapes are all that is looked at.

    Raises:
        AscendError: a component that the model does not have, a block beyond the last, a pattern that fits
            nothing (with the nearest names).
    """
    inventory = Inventory.of(model)
    matches = [
        _match(inventory, component, group, pattern)
        for component, group in targets.groups()
        for pattern in group.modules
    ]
    chosen = {path for match in matches for path in match.modules}
    names = tuple(path for path in inventory.linears if path in chosen)
    return Selection(tuple(matches), names, tuple(_warnings(inventory, names)))


def _match(inventory: Inventory, component: str, group: Group, pattern: str) -> Match:
    key, layout = f"ascend.targets.{component}", inventory.layout
    if component not in layout.roots:
        raise AscendError(f"`{key}`: this model has no such component", f"it has: {', '.join(layout.roots)}")
    fitting, by_name_alone = _fitting(inventory, component, pattern)
    if not fitting:
        raise _nothing(inventory, component, pattern, by_name_alone)
    blocks = "" if group.blocks == EVERY_BLOCK else ", ".join(group.blocks)
    if blocks:
        numbers = _numbers(inventory, component, group)
        inside = [path for path in fitting if layout.block_of(component, path) in numbers]
        if not inside:
            numbered = [layout.block_of(component, path) for path in fitting]
            elsewhere = sorted({number for number in numbered if number is not None})
            has = f"blocks {', '.join(map(str, elsewhere))} have it" if elsewhere else "it lies outside them"
            raise AscendError(f"`{key}`: no block of `{blocks}` has `{pattern}`", has)
        fitting = inside
        by_name_alone = [path for path in by_name_alone if layout.block_of(component, path) in numbers]
    left_out = [
        f"{path} (only by name)"
        for path in by_name_alone
        if not any(ends_with(path, other) for other in group.modules)
    ]
    if pattern not in SETS:
        left_out += [
            f"{path} ({type(module).__name__})"
            for path, module in inventory.modules.items()
            if path not in inventory.linears
            and layout.component_of(path) == component
            and ends_with(path, pattern)
            and any(True for _ in module.parameters(recurse=False))
        ]
    experts = _experts(inventory, component, pattern)
    if experts:
        left_out.append(f"{experts[0]} and such (routed experts in one 3-D parameter)")
    return Match(component, pattern, blocks, tuple(fitting), tuple(_grouped(left_out)))


def _grouped(sentences: Iterable[str]) -> Iterable[str]:
    """Yield the sentences, those that differ in a block's number once."""
    return dict.fromkeys(re.sub(r"\.\d+\.", ".N.", sentence) for sentence in sentences)


def _numbers(inventory: Inventory, component: str, group: Group) -> tuple[int, ...]:
    key = f"ascend.targets.{component}.blocks"
    path = inventory.layout.blocks.get(component)
    if path is None:
        raise AscendError(f"`{key}`: the {component} has no numbered blocks in this model", "leave it out")
    count = sum(1 for _ in inventory.modules[path].children())
    try:
        return block_numbers(group.blocks, count)
    except ValueError as error:
        raise AscendError(f"`{key}`: {error}", f"count from 0 in {path}") from None


def _fitting(inventory: Inventory, component: str, pattern: str) -> tuple[list[str], list[str]]:
    """Return the linear layers that fit in any block, and those of a set that are only adapted by name."""
    within = inventory.within(component)
    if pattern not in SETS:
        return [path for path in within if ends_with(path, pattern)], []
    if component in inventory.layout.blocks:  # a set is about blocks: the output head is in none
        within = [path for path in within if inventory.layout.block_of(component, path) is not None]
    if pattern != "all":
        within = [path for path in within if not {*path.split(".")[:-1]}.isdisjoint(HOLDERS[pattern])]
    fitting = [path for path in within if not _only_by_name(path)]
    return fitting, [path for path in within if _only_by_name(path)]


def _only_by_name(path: str) -> bool:
    leaf = path.rpartition(".")[2]
    return leaf.isdigit() or leaf in ONLY_BY_NAME


def _experts(inventory: Inventory, component: str, pattern: str) -> list[str]:
    """Return the routed experts' parameters that a pattern seems to mean."""
    within = [path for path in inventory.experts if inventory.layout.component_of(path) == component]
    return within if pattern in ("all", "mlp") else [path for path in within if ends_with(path, pattern)]


def _nothing(inventory: Inventory, component: str, pattern: str, by_name_alone: list[str]) -> AscendError:
    """Return the error for a pattern that fits no linear layer of a component: what it may have meant."""
    what = f"`ascend.targets.{component}.modules`: no linear layer fits `{pattern}`"
    if by_name_alone:
        names = sorted({_short(path) for path in by_name_alone})
        return AscendError(
            f"{what} but those that are only adapted by name", f"write them: {', '.join(names)}"
        )
    experts = _experts(inventory, component, pattern)
    if experts:
        return AscendError(
            f"{what}: {experts[0]} holds all routed experts in one 3-D parameter, which LoRA and OFT do not "
            "reach",
            "name other modules; the attention of such a model has linear layers",
        )
    others = [
        f"{path} is a {type(module).__name__}"
        for path, module in inventory.modules.items()
        if inventory.layout.component_of(path) == component and ends_with(path, pattern)
    ]
    names = list(dict.fromkeys(name for path in inventory.within(component) for name in _ends(path)))
    near = [] if pattern in SETS else difflib.get_close_matches(pattern, names, n=NEAREST)
    hint = f"did you mean `{'`, `'.join(near)}`?" if near else _known(inventory, component)
    if others:
        return AscendError(f"{what}: {others[0]}, and only linear layers are adapted", hint)
    elsewhere = [
        other
        for other in inventory.layout.roots
        if other != component and any(ends_with(path, pattern) for path in inventory.within(other))
    ]
    if elsewhere:
        what += f" there; the {elsewhere[0]} component has some"
    return AscendError(what, hint)


def _known(inventory: Inventory, component: str) -> str:
    names = sorted({_short(path) for path in inventory.within(component)})
    return f"it has: {', '.join(names)}" if names else "it has no linear layer at all"


def _short(path: str) -> str:
    """Return the end of a path that names it well: with its parent, where that is no number."""
    *_, parent, leaf = ["", *path.split(".")]
    return f"{parent}.{leaf}" if parent and not parent.isdigit() else leaf


def _ends(path: str) -> list[str]:
    leaf = path.rpartition(".")[2]
    return [_short(path)] if leaf.isdigit() else [leaf, _short(path)]


def _warnings(inventory: Inventory, names: Iterable[str]) -> Iterable[str]:
    gates = {path.rpartition(".")[2]: path for path in names if path.rpartition(".")[2] in GATES}
    for leaf, path in gates.items():
        width = getattr(inventory.linears[path], "out_features", "?")
        yield (
            f"`{leaf}` is {width} wide, one or two values per head: vLLM cannot serve an adapter whose rank "
            "is above that width divided by its tensor parallel size"
        )


def exact(names: Iterable[str], model: nn.Module) -> list[str] | str:
    """Return what PEFT has to be given to adapt these modules and no others.

    PEFT takes the entries of a list as ends of paths. A whole path can only be the end of another one where a
    model holds a second one of its kind; then an anchored regular expression says it, which PEFT matches in
    full. A list is what others that load adapters (vLLM) understand best.
    """
    wanted = list(names)
    others = {name for name, _ in model.named_modules()}.difference(wanted)
    ends = tuple(f".{name}" for name in wanted)
    if any(name.endswith(ends) for name in others):
        return "|".join(re.escape(name) for name in wanted)
    return wanted
