"""Back ends as data: who computes an operator, where its function lies, and what it needs."""

import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLOATS = ("float32", "bfloat16", "float16")
ATLAS_A2_A3 = ("Ascend910B", "Ascend910_93")
OLDEST_FLA = (0, 5, 2)  # the first with Ascend kernels for forward and backward


@dataclass(frozen=True)
class Backend:
    """One way to compute one operator.

    Attributes:
        name: as in `ascend.kernels: {operator: name}`.
        operator: a name of ``operators.OPERATORS``.
        target: "module:function"; imported when the back end is going to be used, not before.
        order: `auto` tries the smallest first.
        devices: device types it runs on; empty: any.
        socs: beginnings of the device names it runs on; empty: any.
        dtypes: dtypes it takes; others are cast to the last one named, and the result back.
        varlen: keeps packed samples apart.
        grouped_heads: takes fewer key than value heads; otherwise keys are repeated before the call.
        backward: can be trained through.
        requires: each returns "" or why the back end cannot be used here; must not import the back end
            unless nothing cheaper speaks against it. Asked in order, until the first reason.
    """

    name: str
    operator: str
    target: str
    order: int = 0
    devices: tuple[str, ...] = ()
    socs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = FLOATS
    varlen: bool = False
    grouped_heads: bool = True
    backward: bool = True
    requires: tuple[Callable[[], str], ...] = ()

    def load(self) -> Callable[..., Any]:
        """Import the function.

        Raises:
            Exception: whatever the import of the module raises.
        """
        module, _, name = self.target.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function


@dataclass(frozen=True)
class TorchNpuOperator:
    """Requirement: torch_npu has an operator of this name."""

    name: str

    def __call__(self) -> str:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        import torch_npu

        return "" if hasattr(torch_npu, self.name) else f"this torch_npu has no {self.name}"


def fla_is_usable() -> str:
    """Say why flash-linear-attention's Ascend kernels cannot be used, "" if they can.

    It decides at its import whether it runs on an NPU, from Triton's active driver, and falls back to its
    generic kernels silently. So it is imported last, once nothing else speaks against it.
    """
    version = _version("flash-linear-attention")
    if not version:
        return (
            "flash-linear-attention is not installed (pip install --no-deps flash-linear-attention fla-core)"
        )
    if numbers(version) < OLDEST_FLA:
        return f"flash-linear-attention {version} has no complete Ascend kernels; 0.5.2 is the first that has"
    missing = triton_is_usable()
    if missing:
        return missing
    try:
        sees_npu = importlib.import_module("fla.utils").IS_NPU
    except Exception as error:
        return f"flash-linear-attention {version} cannot be imported: {type(error).__name__}: {error}"
    return (
        ""
        if sees_npu
        else f"flash-linear-attention {version} does not see the NPU: Triton's driver is another"
    )


def triton_is_usable() -> str:
    """Say why Triton kernels cannot run on an NPU here, "" if they can; imports nothing."""
    if not _version("triton-ascend"):
        return "triton-ascend is not installed (it replaces triton: uninstall that first)"
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if not home:
        return "CANN is not sourced: source its set_env.sh (ASCEND_HOME_PATH is not set)"
    return "" if Path(home).is_dir() else f"CANN is missing: ASCEND_HOME_PATH={home} does not exist"


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, e.g. (0, 5, 2) of 0.5.2rc1."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _fla(operator: str) -> Backend:
    return Backend(
        "fla",
        operator,
        f"llamafactory_ascend.kernels.fla:{operator}",
        10,
        devices=("npu",),
        socs=ATLAS_A2_A3,
        varlen=True,
        requires=(fla_is_usable,),
    )


def _pytorch(operator: str) -> Backend:
    target = f"llamafactory_ascend.kernels.{operator}"
    name = "chunk_gated_delta_rule" if operator == "gated_delta_rule" else operator
    return Backend("pytorch", operator, f"{target}:{name}", 30, varlen=True)


def _torch_npu(operator: str, module: str, needs: str) -> Backend:
    return Backend(
        "torch_npu",
        operator,
        f"llamafactory_ascend.kernels.fused.{module}:{operator}",
        20,
        devices=("npu",),
        requires=(TorchNpuOperator(needs),),
    )


BUILT_IN: tuple[Backend, ...] = (
    _fla("gated_delta_rule"),
    _pytorch("gated_delta_rule"),
    _fla("causal_conv1d"),
    _pytorch("causal_conv1d"),
    _torch_npu("rms_norm", "norms", "npu_rms_norm"),
    _torch_npu("rms_norm_1p", "norms", "npu_rms_norm"),
    _torch_npu("rms_norm_gated", "norms", "npu_rms_norm"),
    _torch_npu("rope", "rotary", "npu_rotary_mul"),
    _torch_npu("swiglu", "activation", "npu_swiglu"),
)
