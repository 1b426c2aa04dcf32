"""Quantised training on NPUs: bitsandbytes has no kernels for them that are known to train rightly."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from llamafactory_ascend.run import Arguments, Run

BITSANDBYTES = "bitsandbytes"
METHODS = ("bnb", BITSANDBYTES)  # the host's name in recipes, and Transformers' in config.json


def method_of(folder: Path) -> str:
    """Return the quantisation that the model in a local folder was saved with, "" where there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str((config.get("quantization_config") or {}).get("quant_method", ""))
    except (OSError, ValueError, AttributeError):
        return ""  # a name on a hub, or broken, which the loader says better


def judge(bits: int | None, method: str, saved: str, allowed: bool) -> list[Finding]:
    """Refuse what trains with an abnormal loss on an NPU, unless it is allowed.

    Args:
        bits: `quantization_bit`.
        method: `quantization_method`.
        saved: the quantisation of the model's own weights.
        allowed: `ascend.allow` names it.
    """
    if bits is not None and method in METHODS and not saved:
        asked = f"`quantization_bit: {bits}` with {BITSANDBYTES}"
    elif saved in METHODS:
        asked = f"the model is saved in {BITSANDBYTES}' format, and"
    else:
        return []
    message = f"{asked} trains with an abnormal loss on NPUs"
    if allowed:
        message += "; allowed by `ascend.allow`: compare the loss with an unquantised run"
        return [Finding("warning", "quantization", message)]
    message += (
        f". Train unquantised weights, sharded if they are too large for a card (see recipes/); "
        f"`ascend: {{allow: [{BITSANDBYTES}]}}` lets it pass"
    )
    return [Finding("error", "quantization", message)]


@hookimpl
def ascend_preflight(run: "Run", arguments: "Arguments") -> list[Finding]:
    if arguments.training.device.type != "npu" or not arguments.training.do_train:
        return []
    model = arguments.model
    saved = method_of(Path(model.model_name_or_path))
    method = str(getattr(model.quantization_method, "value", model.quantization_method))
    return judge(model.quantization_bit, method, saved, BITSANDBYTES in run.settings.allow)
