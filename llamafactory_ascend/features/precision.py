"""bfloat16, float16 or float32: what the SoC computes in, and what follows for the run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llamafactory_ascend import device
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from llamafactory_ascend.device import Device
    from llamafactory_ascend.run import Arguments, Run

SWITCHES = ("bf16", "pure_bf16", "bf16_full_eval")
ON = {"true", "yes", "t", "y", "on", "1"}  # as argparse and YAML write it for the host
LOSS_SCALING = (
    "loss scaling is dynamic: it starts at 65536, halves when gradients overflow (the step is skipped) and "
    "doubles after 2000 good steps; host and Trainer have no setting for it, DeepSpeed has its own"
)


def asks_for_bfloat16(recipe: Mapping[str, Any]) -> str:
    """Return the key and value with which a recipe asks for bfloat16, "" where it does not."""
    for key in SWITCHES:
        if str(recipe.get(key, "")).lower() in ON:
            return f"{key}: true"
    trains = str(recipe.get("do_train", "")).lower() in ON  # then the host does not look at infer_dtype
    return "infer_dtype: bfloat16" if recipe.get("infer_dtype") == "bfloat16" and not trains else ""


def judge(recipe: Mapping[str, Any], found: "Device") -> list[Finding]:
    """Refuse bfloat16 on a SoC that has none, before a model is loaded."""
    asked = asks_for_bfloat16(recipe)
    if not asked or found.type != "npu" or found.bfloat16:
        return []
    instead = "infer_dtype: float16" if asked.startswith("infer_dtype") else "fp16: true"
    message = f"`{asked}`, but {found.name} does not compute in bfloat16; write `{instead}` instead"
    return [Finding("error", "precision", message)]


def decide(training: Any, pure_bf16: bool, found: "Device") -> tuple[str, str]:
    """Return (choice, reason) of the precision a run trains in."""
    if pure_bf16:
        return "bf16, weights included", f"`pure_bf16: true`; {found.name} computes in bfloat16"
    if training.bf16:
        return "bf16", f"`bf16: true`; {found.name} computes in bfloat16, whose range needs no loss scaling"
    if training.fp16:
        spare = "; bf16 would need none of it" if found.bfloat16 else f"; {found.name} has no bfloat16"
        return "fp16 with loss scaling", f"`fp16: true`; {LOSS_SCALING}{spare}"
    return "as the weights are loaded", "neither `bf16` nor `fp16` is set: no autocast, no loss scaling"


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    training = arguments.training
    if training.device.type == "npu" and training.do_train:
        found = device.decide("npu")
        run.decide("precision", *decide(training, bool(arguments.finetuning.pure_bf16), found))


@hookimpl
def ascend_preflight(run: "Run", arguments: "Arguments") -> list[Finding]:
    """Say that a run without a wish trains in float16 without loss scaling, where there is no bfloat16."""
    training = arguments.training
    wish = training.bf16 or training.fp16 or arguments.finetuning.pure_bf16 or training.deepspeed
    if training.device.type != "npu" or not training.do_train or wish:
        return []
    found = device.decide("npu")
    if found.bfloat16:
        return []
    message = (
        f"the host loads the weights in float16 where the device has no bfloat16 ({found.name}), and small "
        "gradients vanish without loss scaling; write `fp16: true`"
    )
    return [Finding("warning", "precision", message)]
