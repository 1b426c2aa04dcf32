"""LLaMA-Factory on Huawei Ascend NPUs: stock ``llamafactory-cli train``, right, frugal and proven.

Nothing is imported here but pluggy's marker, and that only when somebody asks for it: this package is
loaded by ``import torch`` in every process of the machine.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name == "hookimpl":
        from llamafactory_ascend.hookspecs import hookimpl

        return hookimpl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
