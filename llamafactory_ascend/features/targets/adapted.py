"""What a model's adapters really sit on, and which of the host's patterns put them there."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from llamafactory_ascend.features.layers import component_of, plain_name
from llamafactory_ascend.features.targets.inventory import ends_with
from llamafactory_ascend.features.targets.request import COMPONENTS

EXAMPLES = 3
HINT = "name them exactly with `ascend.targets`, see docs/targets.md"


@dataclass(frozen=True)
class Adapted:
    """The adapters and trainable parameters of a model.

    Attributes:
        modules: plain path of each adapted module -> class of the layer under the adapter.
        trainable: component -> parameters that require a gradient, the adapters' and others.
        parameters: of the whole model, frozen and adapters included.
    """

    modules: Mapping[str, str]
    trainable: Mapping[str, int]
    parameters: int

    @classmethod
    def of(cls, model: nn.Module) -> "Adapted":
        """Look at a model; one on the meta device or sharded by ZeRO-3 is counted in full."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        modules = {
            plain_name(name): type(module.get_base_layer()).__name__
            for name, module in model.named_modules()
            if isinstance(module, BaseTunerLayer)
        }
        trainable: Counter[str] = Counter()
        total = 0
        for name, parameter in model.named_parameters():
            count = size(parameter)
            total += count
            if parameter.requires_grad:
                trainable[component_of(plain_name(name))] += count
        return cls(modules, dict(trainable), total)

    def per_component(self) -> dict[str, int]:
        """Return component -> adapted modules, for those that have any."""
        return count_components(self.modules)


def tied(model: nn.Module) -> Iterator[str]:
    """Yield a sentence for each adapted module that shares its weight with an embedding.

    PEFT merges by writing into that weight, which turns the embedding into something nobody has trained.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    embeddings = {id(module.weight): plain_name(name) for name, module in find(model, nn.Embedding)}
    for name, module in find(model, BaseTunerLayer):
        base = module.get_base_layer()
        if not isinstance(base, nn.Embedding) and id(getattr(base, "weight", None)) in embeddings:
            yield (
                f"{plain_name(name)} has an adapter and shares its weight with "
                f"{embeddings[id(base.weight)]}: merging it (`llamafactory-cli export`) changes both, so "
                "that the merged model is not what was trained; leave it out, or serve the adapter unmerged"
            )


def find(model: nn.Module, kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a kind by their path."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, kind))


def size(parameter: Any) -> int:
    """Return how many numbers a parameter stands for: ZeRO-3 empties it, 4 bits share a byte."""
    count = int(parameter.numel() or getattr(parameter, "ds_numel", 0))
    if type(parameter).__name__ != "Params4bit":
        return count
    stored = getattr(getattr(parameter, "quant_storage", None), "itemsize", 1)
    return count * 2 * stored


def count_components(names: Iterable[str]) -> dict[str, int]:
    """Return component -> how many paths lie in it, in the order text, projector, vision."""
    counts = Counter(component_of(name) for name in names)
    return {component: counts[component] for component in COMPONENTS if counts[component]}  # type: ignore[index]


def by_pattern(adapted: Adapted, patterns: Iterable[str]) -> dict[str, list[str]]:
    """Return pattern -> adapted modules that it reached.

    PEFT compares whole ends of paths; the host, with models that have a tower, compares parts of them. So a
    module is put down to the patterns that end its path, and where none does to those it contains.
    """
    found: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    for path in adapted.modules:
        whole = [pattern for pattern in found if ends_with(path, pattern)]
        for pattern in whole or [one for one in found if one == "all" or one in path]:
            found[pattern].append(path)
    return found


def surprises(adapted: Adapted, patterns: Mapping[str, list[str]], setting: str) -> list[str]:
    """Say where one of the host's patterns reached more than its words say.

    Args:
        patterns: of ``by_pattern``.
        setting: `lora_target` or `oft_target`, for the message.
    """
    found = []
    for pattern, paths in patterns.items():
        if pattern == "all":
            continue
        counts = count_components(paths)
        if not paths:
            found.append(f"`{setting}: {pattern}` adapts nothing of its own")
        if len(counts) > 1:
            where = " and ".join(f"{count} modules of {component}" for component, count in counts.items())
            found.append(f"`{setting}: {pattern}` adapts {where} ({HINT})")
        parts = [path for path in paths if not is_whole(path, pattern)]
        if parts:
            leaves = ", ".join(list(dict.fromkeys(path.rpartition(".")[2] for path in parts))[:EXAMPLES])
            found.append(
                f"`{setting}: {pattern}` adapts {len(parts)} modules that have it as a part of another name "
                f"({leaves}, e.g. {parts[0]}); {HINT}"
            )
    odd = [
        f"{path} ({kind})"
        for path, kind in adapted.modules.items()
        if "Linear" not in kind or path.rpartition(".")[2].isdigit()
    ]
    if odd:
        found.append(
            f"`{setting}` adapts {len(odd)} modules that are no named linear layer: "
            f"{', '.join(odd[:EXAMPLES])}"
        )
    return found


def is_whole(path: str, pattern: str) -> bool:
    """True where a pattern is a run of whole parts of a path."""
    return f".{pattern.strip('.')}." in f".{path}."
