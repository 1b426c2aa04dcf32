"""Versions of what a run stands on."""

import importlib.metadata
import platform

from llamafactory_ascend import __version__

PACKAGES = (
    "torch", "torch_npu", "transformers", "peft", "accelerate", "trl", "datasets", "deepspeed",
    "triton", "triton-ascend", "flash-linear-attention",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return name -> version of Python, the plugin, the host, CANN and the packages that are installed."""
    found = {"python": platform.python_version(), "llamafactory-ascend-plugin": __version__}
    try:
        # A fork may own the import package under another distribution name: ask the code, not the metadata.
        from llamafactory.extras.env import VERSION

        found["llamafactory"] = VERSION
    except ImportError:
        found["llamafactory"] = "not installed"
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import torch

    if cann := getattr(torch.version, "cann", None):
        found["cann"] = str(cann)
    return found
