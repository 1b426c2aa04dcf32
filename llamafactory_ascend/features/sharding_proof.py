"""Proof of sharding: the FSDP modules of this rank, counted when training begins."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback

if TYPE_CHECKING:
    from llamafactory_ascend.run import Run


class ShardingProof(TrainerCallback):  # type: ignore[misc]
    """Counts what FSDP wrapped and compares it with the classes the recipe names."""

    def __init__(self, run: "Run", plugin: Any, names: list[str]) -> None:
        """Keep what to compare with.

        Args:
            plugin: accelerate's FSDP settings, None where it ignores FSDP.
            names: ``transformer_layer_cls_to_wrap`` of the recipe.
        """
        self.run, self.plugin, self.names = run, plugin, names

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self.plugin is None:
            self.run.miss("sharding", "`fsdp` is in the recipe, but accelerate did not shard the model")
            return
        section = count(model, self.names)
        section |= {
            "version": self.plugin.fsdp_version,
            "state_dict_type": self.plugin.state_dict_type.name,
            "offload": offloads(self.plugin),
        }
        self.run.facts["sharding"] = (self.run.facts.get("sharding") or {}) | section
        for problem in problems(section):
            self.run.miss(
                "sharding", problem, "FSDP gathers a layer that is no unit of its own together with the rest"
            )


def offloads(plugin: Any) -> bool:
    """True where parameters live in host memory between uses; FSDP1 and FSDP2 say it differently."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return isinstance(plugin.cpu_offload, CPUOffloadPolicy) or bool(
        getattr(plugin.cpu_offload, "offload_params", False)
    )


def count(model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Count the FSDP modules of a model.

    Returns:
        ``modules`` (the root included) and ``classes``: for each name [modules of that class that are FSDP
        units, modules of that class].
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    modules = 0
    classes = {name: [0, 0] for name in names}
    for module in model.modules():
        unit = isinstance(module, (FSDPModule, FullyShardedDataParallel))
        modules += unit
        # FSDP1 wraps a module; FSDP2 makes it an instance of a class "FSDP" + its name.
        inner = getattr(module, "_fsdp_wrapped_module", None) if unit else None
        for name, numbers in classes.items():
            if inner is not None:
                numbers[0] += is_a(inner, name)
            elif is_a(module, name):
                numbers[0] += unit
                numbers[1] += 1
    return {"modules": modules, "classes": classes}


def is_a(module: nn.Module, name: str) -> bool:
    """True where a module is an instance of a class of this name, as accelerate's wrapping asks it."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def problems(section: dict[str, Any]) -> list[str]:
    """Return a sentence for each class not wrapped everywhere, or one if only the root was."""
    found = [
        f"{wrapped} of {total} modules of class {name} are FSDP units of their own"
        for name, (wrapped, total) in section["classes"].items()
        if wrapped != total or not total
    ]
    if not found and section["modules"] <= 1:
        found.append(f"{section['modules']} FSDP module: no layer is a unit of its own")
    return found
