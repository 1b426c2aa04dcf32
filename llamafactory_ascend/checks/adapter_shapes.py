"""Adapter tensors by module: which belong together, which shapes they must have, which are missing."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from llamafactory_ascend.checks import oft as oft_blocks
from llamafactory_ascend.checks.safetensors_header import TensorInfo

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Modules = Mapping[str, Mapping[str, Shape]]

PREFIX = "base_model.model."
TENSOR = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|oft_R)(\.weight)?"
)
LAYER = re.compile(r"(?P<stack>.*?)\.(?P<index>\d+)\.(?P<rest>.+)")
PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
# Linear layers of a text decoder at the residual stream, in the names of Transformers.
READS_HIDDEN = {
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_a",
    "in_proj_b",
}
WRITES_HIDDEN = {"o_proj", "down_proj", "out_proj"}


def by_module(shapes: Shapes) -> dict[str, dict[str, Shape]]:
    """Return module -> kind of tensor -> shape; tensors of modules_to_save are left out."""
    modules: dict[str, dict[str, Shape]] = defaultdict(dict)
    for key, shape in shapes.items():
        if match := TENSOR.fullmatch(key):
            modules[match["module"].removeprefix(PREFIX)][match["kind"]] = shape
    return dict(modules)


def module_faults(modules: Modules, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (module, reason) where a module's tensors do not fit each other or adapter_config.json."""
    for name, tensors in modules.items():
        yield from ((name, reason) for reason in _malformed(tensors))
        yield from ((name, reason) for reason in _unpaired(tensors))
        yield from (
            (name, reason)
            for reason in _misfits(tensors, rank_of(name, config), bool(config.get("target_parameters")))
        )
        if "oft_R" in tensors:
            yield from ((name, reason) for reason in oft_blocks.block_faults(tensors["oft_R"], config))


def _malformed(tensors: Mapping[str, Shape]) -> Iterator[str]:
    for kind, shape in tensors.items():
        if kind == "oft_R" and shape[1:] == (0,) and shape[0]:
            continue  # blocks of 1 x 1 have no free entry, and a reason of their own
        if 0 in shape:
            yield f"{kind} is empty (shape {list(shape)})"
        elif kind != "lora_magnitude_vector" and len(shape) < 2:
            yield f"{kind} is no matrix (shape {list(shape)})"


def _unpaired(tensors: Mapping[str, Shape]) -> Iterator[str]:
    for first, second in PAIRS:
        if (first in tensors) != (second in tensors):
            there, gone = (first, second) if first in tensors else (second, first)
            yield f"{there} without {gone}"
    if "lora_magnitude_vector" in tensors and not {"lora_B", "lora_embedding_B"} & set(tensors):
        yield "lora_magnitude_vector without lora_B"


def _misfits(tensors: Mapping[str, Shape], rank: int, experts: bool) -> Iterator[str]:
    for first, second in PAIRS:
        a, b = tensors.get(first, ()), tensors.get(second, ())
        # With `target_parameters` PEFT stacks the ranks of all experts in one pair.
        if len(a) >= 2 and 0 not in a and (a[0] % rank if experts else a[0] != rank):
            yield f"{first} has {a[0]} rows, the rank is {rank}"
        if len(b) >= 2 and 0 not in b and (b[1] % rank if experts else b[1] != rank):
            yield f"{second} has {b[1]} columns, the rank is {rank}"
        magnitude = tensors.get("lora_magnitude_vector", ())
        if magnitude and b and b[0] not in magnitude:
            yield f"lora_magnitude_vector has shape {list(magnitude)}, {second} has {b[0]} rows"


def rank_of(module: str, config: Mapping[str, Any]) -> int:
    """Return a module's LoRA rank: PEFT matches the keys of ``rank_pattern`` at the end of the path."""
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return int(rank)
    return max(1, int(config.get("r") or 1))


def base_faults(
    modules: Modules, config: Mapping[str, Any], base: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, str]]:
    """Yield (module, reason) where widths differ from those of the base model's weights.

    Args:
        base: headers of the base model's files; modules it does not name, or holds quantized, are not judged.
    """
    for name, tensors in modules.items():
        weight = base.get(f"{name}.weight")
        if weight is None or weight.dtype[0] not in "BF" or len(weight.shape) < 2:
            continue
        out, *inner = reversed(weight.shape) if config.get("fan_in_fan_out") else weight.shape
        a, b, oft = tensors.get("lora_A", ()), tensors.get("lora_B", ()), tensors.get("oft_R", ())
        if len(a) >= 2 and list(a[1:]) != inner:
            yield name, f"lora_A reads {list(a[1:])}, the base model's layer reads {inner}"
        if len(b) >= 2 and b[0] != out:
            yield name, f"lora_B writes {b[0]}, the base model's layer writes {out}"
        block = oft_blocks.block_size(oft[1]) if len(oft) == 2 else None
        if block and len(inner) == 1 and inner[0] != block * oft[0] and not config.get("block_share"):
            yield name, f"oft_R covers {block * oft[0]} inputs, the base model's layer has {inner[0]}"


def hidden_faults(modules: Modules, hidden: int) -> Iterator[tuple[str, str]]:
    """The same from the base model's config alone: text layers that read or write the residual stream."""
    for name, tensors in modules.items():
        leaf = name.rpartition(".")[2]
        a, b = tensors.get("lora_A", ()), tensors.get("lora_B", ())
        if leaf in READS_HIDDEN and len(a) == 2 and a[1] != hidden:
            yield name, f"lora_A reads {a[1]}, the base model's hidden_size is {hidden}"
        oft = tensors.get("oft_R", ())
        block = oft_blocks.block_size(oft[1]) if len(oft) == 2 and oft[0] > 1 else None  # one may be shared
        if leaf in READS_HIDDEN and block and oft[0] * block != hidden:
            yield name, f"oft_R covers {oft[0] * block} inputs, the base model's hidden_size is {hidden}"
        if leaf in WRITES_HIDDEN and len(b) == 2 and b[0] != hidden:
            yield name, f"lora_B writes {b[0]}, the base model's hidden_size is {hidden}"


def missing_targets(modules: Modules, config: Mapping[str, Any], base: Mapping[str, TensorInfo]) -> list[str]:
    """Return what ``target_modules`` asks for and the file does not hold.

    With the base model's headers every layer counts that lies in a stack the adapter touches (a stack of
    ``mtp.layers`` that Transformers does not load is none); without them every entry of the list must have
    left at least one module.
    """
    targets = config.get("target_modules") or []
    if targets == "all-linear" or not modules:
        return []
    if any(f"{name}.weight" in base for name in modules):
        stacks = {stack_of(name) for name in modules}
        names = [
            key.removesuffix(".weight")
            for key, info in base.items()
            if key.endswith(".weight") and len(info.shape) > 1
        ]
        wanted = [name for name in names if stack_of(name) in stacks and is_target(name, config)]
        return [name for name in wanted if name not in modules]
    if isinstance(targets, str):
        return []
    return sorted(
        entry for entry in targets if not any(name == entry or name.endswith(f".{entry}") for name in modules)
    )


def stack_of(name: str) -> str:
    """Return the path before the first layer number: ``model.layers`` of ``model.layers.3.mlp.up_proj``."""
    match = LAYER.fullmatch(name)
    return match["stack"] if match else name.rpartition(".")[0]


def is_target(name: str, config: Mapping[str, Any]) -> bool:
    """True where PEFT adapts a module of this name (its rules for target_modules, exclusions and layers)."""

    def matches(pattern: str | list[str]) -> bool:
        if isinstance(pattern, str):
            return re.fullmatch(pattern, name) is not None
        return any(name == entry or name.endswith(f".{entry}") for entry in pattern)

    if (excluded := config.get("exclude_modules")) and matches(excluded):
        return False
    layers = config.get("layers_to_transform")
    if layers is not None and (match := LAYER.fullmatch(name)):
        wanted = [layers] if isinstance(layers, int) else layers
        if int(match["index"]) not in wanted:
            return False
    return matches(config.get("target_modules") or [])


def uneven_layers(modules: Modules, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (layer, reason) where layers that adapt the same block do not adapt the same parts of it.

    A hybrid's layers differ in their blocks (`self_attn`, `linear_attn`), so blocks are compared, not layers.
    Nothing is said where ``target_modules`` itself picks layers by number.
    """
    targets = config.get("target_modules") or []
    if any(
        re.search(r"\.\d|\\d|\[\d", entry) for entry in ([targets] if isinstance(targets, str) else targets)
    ):
        return
    blocks: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in modules:
        if match := LAYER.fullmatch(name):
            parent, _, leaf = match["rest"].rpartition(".")
            blocks[match["stack"], parent][match["index"]].add(leaf)
    for (stack, parent), layers in blocks.items():
        everything = set().union(*layers.values())
        for index, parts in layers.items():
            if parts != everything:
                yield (
                    f"{stack}.{index}.{parent}",
                    f"without {', '.join(sorted(everything - parts))}, which other layers have",
                )
