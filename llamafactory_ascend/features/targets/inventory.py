"""A model as names: its modules, which of them an adapter fits, and where they belong."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from llamafactory_ascend.features.layers import plain_name
from llamafactory_ascend.features.targets.layouts import Layout, layout_of


@dataclass(frozen=True)
class Inventory:
    """A model as names. Adapters that it already has are seen through.

    Attributes:
        modules: plain path -> module, without what lies inside an adapter.
        linears: those of them that PEFT adapts as a linear layer.
        experts: plain paths of routed experts' weights that are one 3-D parameter.
    """

    layout: Layout
    modules: Mapping[str, nn.Module]
    linears: Mapping[str, nn.Module]
    experts: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "Inventory":
        """Make the inventory of a model.

        Raises:
            AscendError: its components cannot be found.
        """
        modules = plain_modules(model)
        return cls(
            layout=layout_of(model, modules),
            modules=modules,
            linears={path: module for path, module in modules.items() if is_linear(module)},
            experts=tuple(
                plain_name(name)
                for name, parameter in model.named_parameters()
                if parameter.dim() == 3 and "experts" in name.split(".")
            ),
        )

    def within(self, component: str) -> list[str]:
        """Return the linear layers of a component."""
        return [path for path in self.linears if self.layout.component_of(path) == component]


def plain_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return plain path -> module; an adapter stands for the layer that it wraps, and hides what is in it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    found: dict[str, nn.Module] = {}
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside, module = f"{name}.", module.get_base_layer()
        elif isinstance(module, ModulesToSaveWrapper):
            inside, module = f"{name}.", module.original_module
        found[plain_name(name)] = module
    return found


def is_linear(module: nn.Module) -> bool:
    """True for nn.Linear and for the quantised layers that PEFT adapts like it; never for a convolution."""
    if isinstance(module, nn.Linear):
        return True
    named = "Linear" in type(module).__name__ and not any(True for _ in module.children())
    return named and hasattr(module, "in_features") and hasattr(module, "out_features")


def ends_with(path: str, pattern: str) -> bool:
    """True where a path ends with a pattern in whole parts."""
    return path == pattern or path.endswith(f".{pattern}")
