"""FSDP2 as Accelerate prepares a model for it: where weights go, and in which dtype they stay."""

from collections.abc import Callable
from typing import Any

from llamafactory_ascend import run
from llamafactory_ascend.patching import ANYTHING, Patch, Target

UTILS = "accelerate.utils.fsdp_utils"


def prepare_model(original: Callable[..., Any], accelerator: Any, model: Any) -> Any:
    """Leave frozen shards in their dtype where accelerate makes float32 of all of them.

    Only what an optimizer changes needs float32. FSDP gathers in the dtype of `bf16` or `fp16` either way, so
    that a frozen weight of that dtype has the same values there.
    """
    import torch

    if run.current().arguments is None:
        return original(accelerator, model)
    convert = model.to
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        return tensor if is_frozen or not tensor.is_floating_point() else tensor.to(torch.float32)

    def convert_trainable(*args: Any, **kwargs: Any) -> Any:
        return model._apply(widen) if args == (torch.float32,) and not kwargs else convert(*args, **kwargs)

    model.to = convert_trainable  # of this object, and for this call
    try:
        prepared = original(accelerator, model)
    finally:
        del model.to
    if frozen and accelerator.mixed_precision != "no":
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in frozen))
        run.current().decide("fsdp frozen shards", names, "only trainable parameters need float32")
    return prepared


def load_full_state(
    original: Callable[..., Any], accelerator: Any, model: Any, full_sd: Any, *args: Any, **kwargs: Any
) -> Any:
    """Put freshly sharded weights where FSDP2's CPU offload wants them, before they become parameters."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    if not isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
        return original(accelerator, model, full_sd, *args, **kwargs)
    load = model.load_state_dict

    def load_on_cpu(state: Any, *args: Any, **kwargs: Any) -> Any:
        return load({name: tensor.to("cpu") for name, tensor in state.items()}, *args, **kwargs)

    model.load_state_dict = load_on_cpu  # of this object, and for the one call that accelerate makes
    try:
        return original(accelerator, model, full_sd, *args, **kwargs)
    finally:
        del model.load_state_dict


PATCHES = [
    Patch(
        id="fsdp.prepare_model",
        targets=(Target(UTILS, "fsdp2_prepare_model"),),
        around=prepare_model,
        parameters=("accelerator", "model"),
        why="With bf16 or fp16, frozen weights are kept in float32: twice the memory of a LoRA's base model.",
        remove_when="accelerate 1.13.0 is the oldest version in use",
        tested={"c600687963ae": "accelerate 1.11.0 and 1.12.0"},
        fixed={
            "66c042bfb553": "accelerate 1.13.0",
            "7031a8c01fa3": "accelerate 1.14.0",
            "8a4cb9db8310": "accelerate 1.15.0",
        },
    ),
    Patch(
        id="fsdp.load_offloaded",
        targets=(Target(UTILS, "fsdp2_load_full_state_dict"),),
        around=load_full_state,
        parameters=("accelerator", "model", "full_sd", ANYTHING),
        why="With cpu_ram_efficient_loading, offloaded weights stay on the device; FSDP2 refuses to start.",
        remove_when="accelerate 1.13.0 is the oldest version in use",
        tested={"3359aa39b6b5": "accelerate 1.11.0", "9095d0c405b5": "accelerate 1.12.0"},
        fixed={"f9f3d6b0c197": "accelerate 1.13.0", "0831ed678384": "accelerate 1.14.0"},
    ),
]
