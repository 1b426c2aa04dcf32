"""Putting the shared rotations in place of PEFT's, layer by layer; PEFT's classes stay as they are."""

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llamafactory_ascend.features.oft.layer import UNIT, forward, is_linear
from llamafactory_ascend.features.oft.unit import Unit, clock, find_units

if TYPE_CHECKING:
    from peft import PeftModel


class SharedRotations:
    """The units of a model. FSDP2 comes after the model is built, so they are found when it is called.

    Attributes:
        units: those of now.
    """

    def __init__(self, peft_model: "PeftModel") -> None:
        base = peft_model.get_base_model()
        self.base = base
        self.layers = [module for module in base.modules() if is_linear(module)]
        self.units: list[Unit] = []
        self._handles: list[Any] = []
        self._above = above(base, self.layers)
        self._sharded = -1
        self._arrange()
        for layer in self.layers:
            layer.forward = MethodType(forward, layer)
        # PeftModel calls the tuner, which calls its model's `forward` and so none of the model's hooks; a
        # PeftModel without a task and generate() call the model. FSDP's own hooks, of PeftModel, run before.
        peft_model.base_model.register_forward_pre_hook(self._prepare)
        base.register_forward_pre_hook(self._prepare)
        base.register_load_state_dict_post_hook(clock().tick)  # type: ignore[no-untyped-call]

    def _prepare(self, *_: Any) -> None:
        self._arrange()
        self.units[0].prepare()

    def _arrange(self) -> None:
        """Make the units anew where FSDP2 has sharded the model since."""
        from torch.distributed.fsdp import FSDPModule

        sharded = sum(isinstance(module, FSDPModule) for module in self._above)
        if sharded == self._sharded:
            return
        self._sharded = sharded
        for handle in self._handles:
            handle.remove()
        self._handles, self.units = [], []
        for module, layers in find_units(self.base, self.layers).items():
            unit = Unit(layers)
            self.units.append(unit)
            for layer in layers:
                setattr(layer, UNIT, unit)
            if module is not self.base:
                self._handles.append(module.register_forward_pre_hook(unit.prepare))

    @property
    def computed(self) -> int:
        """Return how often rotations were computed from weights."""
        return sum(unit.computed for unit in self.units)


def above(base: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Return the modules on the way from the model to its layers, these included."""
    wanted = set(map(id, layers))
    modules = dict(base.named_modules())
    found: dict[str, nn.Module] = {}
    for name in [name for name, module in modules.items() if id(module) in wanted]:
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            path = ".".join(parts[:depth])
            found[path] = modules[path]
    return list(found.values())


def agrees_with_peft() -> bool:
    """Compare PEFT's own exact layer with ours on a small one; another release may rotate otherwise."""
    from peft.tuners.oft.layer import Linear

    with torch.random.fork_rng(devices=[]):
        layer: Any = Linear(
            nn.Linear(8, 8), "default", r=0, oft_block_size=4, init_weights=False, use_cayley_neumann=False
        )
    setattr(layer, UNIT, Unit([layer]))
    x = torch.linspace(-1, 1, 16).view(2, 8)
    with torch.no_grad():
        return torch.allclose(forward(layer, x), layer(x), atol=1e-5)


def substitute(peft_model: "PeftModel") -> SharedRotations:
    """Let every OFT layer of a model use shared rotations."""
    return SharedRotations(peft_model)
