"""Which attention runs in each part of a model, and that what the recipe asks for works on this host.

On an NPU Transformers turns every mask of SDPA into the boolean one that the fused operator takes, and gives
its flash attention the compressed causal mask; nothing is left to convert.
"""

from typing import TYPE_CHECKING, Any

from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from torch import nn

    from llamafactory_ascend.run import Arguments, Run

# Versions of Transformers whose flash attention calls `.to()` on the attention sinks of models without any.
BROKEN_FLASH_ATTENTION = {"5.6.0": "https://github.com/huggingface/transformers/issues/45588"}
COMPUTED = {
    "sdpa": "torch_npu computes SDPA with its fused operator where the mask is boolean or causal",
    "flash_attention_2": "Transformers calls npu_fusion_attention",
    "eager": "matrices of all scores are kept in memory",
}


def judge(flash_attn: str, transformers: str) -> list[Finding]:
    """Refuse `flash_attn: fa2` on a version of Transformers in which it ends at the first step."""
    if flash_attn != "fa2" or transformers not in BROKEN_FLASH_ATTENTION:
        return []
    message = (
        f"`flash_attn: fa2` fails in Transformers {transformers} for every model without attention sinks "
        f"({BROKEN_FLASH_ATTENTION[transformers]}); write `flash_attn: sdpa`, which runs the same operator "
        "on an NPU, or pip install transformers==5.6.2"
    )
    return [Finding("error", "attention", message)]


def components(config: Any) -> dict[str, str]:
    """Return component -> attention that a model's config has settled on."""
    parts = {"text": config.get_text_config()}
    for name in ("vision", "audio"):
        parts[name] = getattr(config, f"{name}_config", None)
    return {
        name: part._attn_implementation
        for name, part in parts.items()
        if part is not None and getattr(part, "_attn_implementation", None)
    }


@hookimpl
def ascend_preflight(run: "Run", arguments: "Arguments") -> list[Finding]:
    if arguments.training.device.type != "npu":
        return []
    import transformers

    return judge(wish(arguments), transformers.__version__)


@hookimpl
def ascend_after_model(run: "Run", model: "nn.Module") -> None:
    assert run.arguments is not None
    config = getattr(model, "config", None)
    if run.arguments.training.device.type != "npu" or config is None:
        return
    for component, found in components(config).items():
        reason = f"`flash_attn: {wish(run.arguments)}`; {COMPUTED.get(found, 'not one this plugin knows')}"
        run.decide(f"attention.{component}", found, reason)


def wish(arguments: "Arguments") -> str:
    """Return `flash_attn` as the recipe spells it."""
    return str(getattr(arguments.model.flash_attn, "value", arguments.model.flash_attn))
