"""The adapter inside a sharded model: which tensors PEFT saves, and how to gather those and nothing else.

Under FSDP a whole state dict of a 27B model is 54 GB on rank 0 for an adapter of 20 MB, so each trainable
tensor is gathered by itself.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from llamafactory_ascend.features.layers import WRAPPERS

if TYPE_CHECKING:
    from peft import PeftModel


def find_peft_model(model: nn.Module) -> "tuple[str, PeftModel] | None":
    """Return (path, PeftModel): the model itself, inside FSDP1, or under trl's value head."""
    from peft import PeftModel

    return next(
        ((clean(name), module) for name, module in model.named_modules() if isinstance(module, PeftModel)),
        None,
    )


def clean(name: str) -> str:
    """Drop what FSDP, checkpoint wrappers and compile put into a path; trl's ``pretrained_model`` stays."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS - {"pretrained_model"})


def saved_keys(
    peft_model: "PeftModel", names: Iterable[str], embeddings: bool | str = False
) -> dict[str, str]:
    """Return key in adapter_model.safetensors -> name in the model, for every adapter.

    Args:
        names: parameter names of the PeftModel without wrappers. PEFT's own selection decides; it only looks
            at names, so it is given the names in the place of tensors and no shard has to move.
        embeddings: PEFT's ``save_embedding_layers``; "auto" may ask the model hub about the base model.
    """
    from peft import get_peft_model_state_dict

    keys: dict[str, str] = {}
    for adapter in peft_model.peft_config:
        keys |= get_peft_model_state_dict(
            peft_model,
            {name: name for name in names},
            adapter_name=adapter,
            save_embedding_layers=embeddings,
        )
    return keys


def expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]] | None:
    """Return key in adapter_model.safetensors -> shape of an unsharded model; None without PEFT."""
    found = find_peft_model(model)
    if found is None:
        return None
    shapes = {clean(name): tuple(p.shape) for name, p in found[1].named_parameters(remove_duplicate=False)}
    return {key: shapes[name] for key, name in saved_keys(found[1], shapes).items()}


def gather(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather every trainable tensor of a model, and whatever else PEFT saves with its adapters.

    Every rank must call this at the same point. One tensor (FSDP1: one unit that holds something trainable)
    is whole on the device at a time.

    Returns:
        Name without wrappers -> whole tensor on the CPU on rank 0; {} on the other ranks.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    whole = _whole_tensors_fsdp1(model) if sharded else _whole_tensors_fsdp2(model)
    rank = torch.distributed.get_rank()
    return {name: tensor.to("cpu", copy=True) for name, tensor in whole if rank == 0}


def wanted_names(model: nn.Module) -> set[str]:
    """Return the names of the trainable parameters and of whatever else PEFT saves with its adapters.

    Rank 0 decides, because PEFT may ask the model hub, and an answer that differs would hang the gathering.
    """
    parameters = {clean(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    wanted = {name for name, parameter in parameters.items() if parameter.requires_grad}
    decided = [wanted]
    if (found := find_peft_model(model)) and torch.distributed.get_rank() == 0:
        path, peft_model = found
        prefix = f"{path}." if path else ""
        inside = [name.removeprefix(prefix) for name in parameters if name.startswith(prefix)]
        decided = [wanted | {prefix + name for name in saved_keys(peft_model, inside, "auto").values()}]
    torch.distributed.broadcast_object_list(decided, src=0)
    return decided[0]


def _whole_tensors_fsdp2(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves the root unsharded, and cast to the compute type
    wanted = wanted_names(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if clean(name) in wanted:
            yield clean(name), whole_tensor(parameter)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with every rank's part of it; an offloaded one travels through the device."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor.detach()
    whole: torch.Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return whole.detach()


def _whole_tensors_fsdp1(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    units = {name: module for name, module in model.named_modules() if isinstance(module, FSDP)}

    def unit_of(name: str) -> str:
        paths: list[str] = [path for path in units if name.startswith(f"{path}." if path else "")]
        return max(paths, key=len)

    wanted = wanted_names(model)
    trainable = {
        unit_of(name) for name, p in model.named_parameters() if p.requires_grad or clean(name) in wanted
    }
    for path, unit in units.items():
        if path not in trainable:
            continue
        with FSDP.summon_full_params(unit, recurse=False, writeback=False):
            for inner, parameter in unit.named_parameters(remove_duplicate=False):
                name = f"{path}.{inner}" if path else inner
                if unit_of(name) == path and (parameter.requires_grad or clean(name) in wanted):
                    yield clean(name), parameter.detach()


def state_problem(model: nn.Module, state: dict[str, Any]) -> str:
    """Say what is wrong with an adapter's state dict for an FSDP2 model, "" where it is whole.

    Args:
        state: parameter names of the model (adapter names included) -> tensors.
    """
    from torch.distributed.tensor import DTensor

    if any(isinstance(value, DTensor) for value in state.values()):
        return "it holds the slice of rank 0 only"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and clean(name) not in state:
            return f"it holds no `{clean(name)}`"
        if parameter.requires_grad and state[clean(name)].shape != parameter.shape:
            shape = list(state[clean(name)].shape)
            return f"its `{clean(name)}` has shape {shape} instead of {list(parameter.shape)}"
    return ""


def by_model_name(model: nn.Module, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what an adapter file holds under the names of an FSDP2 model; unknown keys are left out."""
    found = find_peft_model(model)
    if found is None:
        return {}
    path, peft_model = found
    prefix = f"{path}." if path else ""
    names = [clean(name) for name, _ in peft_model.named_parameters(remove_duplicate=False)]
    return {prefix + name: saved[key] for key, name in saved_keys(peft_model, names).items() if key in saved}
