"""What the host has to do with kernels: its config comes first; it has a port and a patch of its own."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from llamafactory_ascend import run
from llamafactory_ascend.features import kernels
from llamafactory_ascend.kernels import selection
from llamafactory_ascend.kernels.backends import Backend, triton_is_usable
from llamafactory_ascend.patching import Patch, Target

PORT = "llamafactory.third_party.triton.chunk_gated_delta_rule"


def load_config(original: Callable[..., Any], model_args: Any) -> Any:
    """Choose the kernels as soon as the kind of model is known, which is before its weights are loaded."""
    config = original(model_args)
    now = run.current()
    if now.arguments is not None and now.arguments.model is model_args and now.arguments.training.do_train:
        kernels.prepare(now, now.arguments, config.model_type)
    return config


def patch_qwen3_5_forward_npu(original: Callable[..., None], model: nn.Module) -> None:
    """Let the host's own substitution pass where the plugin makes none, and report what came of it.

    It loops over `model.model.layers`, which the dense model does not have, and then goes on on the slow path
    with a warning; for a `ForCausalLM` it does nothing, without a word; with a triton-ascend that cannot be
    imported it ends the run. Outside training (chat, export, evaluation) the plugin replaces nothing, and the
    host's patch is left to itself.
    """
    now = run.current()
    if now.arguments is None or not now.arguments.training.do_train:
        original(model)
        return
    if kernels.replaces("gated_delta_rule"):
        now.decide("kernels.host_patch", "not applied", "the plugin replaces the gated delta rule itself")
        return
    original(model)
    holders = [x for x in model.modules() if "chunk_gated_delta_rule" in vars(x)]
    ported = [x for x in holders if getattr(x.chunk_gated_delta_rule, "__module__", "") == PORT]
    state = "applied" if holders and len(ported) == len(holders) else "failed"
    now.decide("kernels.host_patch", state, f"{len(ported)} of {len(holders)} layers hold the host's kernel")
    if state == "failed":
        now.find(
            "note" if left_alone(now.settings.kernels) else "warning",
            "kernels",
            f"the host's own NPU kernel reached {len(ported)} of {len(holders)} layers, the others are slow; "
            "`ascend: {kernels: auto}` replaces them",
        )


def left_alone(setting: str | dict[str, str]) -> bool:
    """True where the recipe leaves the gated delta rule to Transformers and the host."""
    return selection.wishes(setting)["gated_delta_rule"] in (selection.OFF, selection.STOCK)


def port_is_usable() -> str:
    """Say why the host's port of the Triton kernels cannot be used, "" if it can; it is not imported."""
    try:
        found = importlib.util.find_spec(PORT)
    except ModuleNotFoundError:
        found = None
    return triton_is_usable() if found else "this version of the host has no port of the kernels"


def port_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Call the host's port; it wants the decay in float32."""
    from llamafactory_ascend.kernels.fla import in_head_ranges

    function = importlib.import_module(PORT).chunk_gated_delta_rule
    return in_head_ranges(function, query, key, value, g.float(), beta, **options)


BACKENDS = [
    Backend(
        "host",
        "gated_delta_rule",
        "llamafactory_ascend.host.kernels:port_gated_delta_rule",
        20,
        devices=("npu",),
        socs=("Ascend910",),
        dtypes=("float16", "bfloat16"),
        varlen=True,
        grouped_heads=False,
        requires=(port_is_usable,),
    )
]

PATCHES = [
    Patch(
        id="kernels.config",
        targets=(Target("llamafactory.model.loader", "load_config"),),
        around=load_config,
        parameters=("model_args",),
        tested={"5fe9616a0220": "0.9.5", "e67238ba0d9e": "0.9.6.dev0"},
        why="The host has no hook between reading the model's config and loading its weights.",
        remove_when="the host offers such a hook",
        feature="kernels",
    ),
    Patch(
        id="kernels.host_patch",
        targets=(Target("llamafactory.model.patcher", "patch_qwen3_5_forward_npu"),),
        around=patch_qwen3_5_forward_npu,
        parameters=("model",),
        tested={"31056030d7a0": "0.9.6.dev0"},
        why=(
            "The host's own substitution of the gated delta rule misses the dense models and can end a run "
            "with an import error."
        ),
        remove_when="the host substitutes the rule in every model that has it",
        feature="kernels",
        optional=True,
    ),
]
