"""Environment of torch_npu and HCCL: defaults for the ranks, and what the user's own values lead to.

A user's value always wins and is shown among the decisions. TASK_QUEUE_ENABLE (1 in torch_npu) and
CPU_AFFINITY_CONF (off) have no default here: see docs/platform.md.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llamafactory_ascend import device
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from llamafactory_ascend.run import Arguments, Run

CONNECT, EXEC, EVENT = "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT"
MODE = "HCCL_OP_EXPANSION_MODE"
CONNECT_RANGE = (120, 7200)  # seconds that HCCL accepts
CONNECT_ADVISED = 300  # torch_npu warns below it
# The first collective of a run is the barrier at which the other ranks wait for rank 0 to load the data set,
# so this bounds the loading; HCCL's own 120 s do not last for a large one. A network that is set up wrongly
# costs as long, which speaks against the 7200 s that are possible.
CONNECT_DEFAULT = 1800
# At the second barrier they wait for rank 0 to tokenise; HCCL's own 1836 s end every run whose data take
# longer. Legal on every SoC (17340 is the most on the first generation).
EXEC_DEFAULT = 7200
EXEC_OF_HCCL = 1836
EXEC_MOST = 2147483647
AIV_WAIT = 1091  # seconds: what HCCL waits in this mode, or waits at most from CANN 8.5 on
# The process group must outlast HCCL, or its watchdog ends the wait first.
WATCHDOG_MARGIN = 60
NEVER = 180000000  # the host's own word for a `ddp_timeout` without end
FLA_NPU, TRANSFER = "fla_npu", "torch_npu.contrib.transfer_to_npu"


def defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return name -> value of what the ranks should have where the user has set nothing."""
    found = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", CONNECT: str(CONNECT_DEFAULT)}
    # The event timeout must be the longer one, and AIV has a wait of its own.
    if not environment.get(EVENT) and environment.get(MODE, "").upper() != "AIV":
        found[EXEC] = str(EXEC_DEFAULT)
    return found


def judge(environment: Mapping[str, str], fla_npu: bool = False, transfer: bool = False) -> list[Finding]:
    """Return what is wrong with, or worth knowing about, the environment of a training on NPUs.

    Args:
        fla_npu: the package fla_npu can be imported.
        transfer: torch_npu's module that puts NPUs in the place of CUDA is loaded in this process.
    """
    found = [*_connect(environment), *_exec(environment)]
    if "HCCL_OP_TIMEOUT" in environment:
        message = (
            "HCCL_OP_TIMEOUT is set, but neither HCCL nor torch_npu has such a variable: the wait in a "
            f"collective is {EXEC} ({environment.get(EXEC, EXEC_OF_HCCL)} s), the wait for the first link "
            f"{CONNECT}; unset it and export the one you mean"
        )
        found.append(Finding("warning", "environment", message))
    if environment.get("TASK_QUEUE_ENABLE") == "2" and fla_npu:
        message = "TASK_QUEUE_ENABLE=2 does not go with fla_npu, which is installed; export 1 instead"
        found.append(Finding("error", "environment", message))
    if transfer:
        message = (
            f"{TRANSFER} is loaded: it replaces torch.cuda, torch.jit.script and more in the whole process, "
            "and the host knows NPUs without it; remove its import (sitecustomize.py, a plugin, remote code)"
        )
        found.append(Finding("error", "environment", message))
    return found


def _connect(environment: Mapping[str, str]) -> list[Finding]:
    text = environment.get(CONNECT)
    if text is None:
        return []
    low, high = CONNECT_RANGE
    if not text.isdecimal() or not low <= int(text) <= high:
        message = f"{CONNECT}={text}: HCCL takes whole seconds from {low} to {high}; unset it, or export one"
        return [Finding("error", "environment", message)]
    if int(text) < CONNECT_ADVISED:
        message = f"{CONNECT}={text} is below the {CONNECT_ADVISED} s that torch_npu advises"
        return [Finding("note", "environment", message)]
    return []


def _exec(environment: Mapping[str, str]) -> list[Finding]:
    text, aiv = environment.get(EXEC), environment.get(MODE, "").upper() == "AIV"
    seconds = _seconds(text or "")
    if text is not None and (seconds is None or not 0 <= seconds <= EXEC_MOST):
        message = (
            f"{EXEC}={text}: HCCL takes seconds from 0 (for ever) to {EXEC_MOST}; unset it, or export one"
        )
        return [Finding("error", "environment", message)]
    found = []
    if aiv and seconds is not None and (seconds > AIV_WAIT or seconds == 0):
        message = (
            f"{EXEC}={text} cannot be kept with {MODE}=AIV, which waits {AIV_WAIT} s; "
            f"unset {MODE}, or export {EXEC}={AIV_WAIT}"
        )
        return [Finding("error", "environment", message)]
    if aiv:
        message = f"{MODE}=AIV is made for inference, and waits {AIV_WAIT} s in a collective; unset it"
        found.append(Finding("warning", "environment", message))
    event = _seconds(environment.get(EVENT, ""))
    wait = EXEC_OF_HCCL if seconds is None else seconds
    if event and event <= wait and not aiv:
        message = (
            f"{EVENT}={environment[EVENT]} must be longer than the wait in a collective ({EXEC}: {wait:g} s)"
        )
        found.append(Finding("warning", "environment", message))
    return found


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def least_ddp_timeout(environment: Mapping[str, str]) -> int:
    """Return the `ddp_timeout` in seconds below which the process group gives up before HCCL does."""
    aiv = environment.get(MODE, "").upper() == "AIV"
    wait = AIV_WAIT if aiv else _seconds(environment.get(EXEC, ""))
    if wait == 0:
        return NEVER
    return int(EXEC_OF_HCCL if wait is None else wait) + WATCHDOG_MARGIN


def loaded() -> dict[str, bool]:
    """Say what of `judge`'s arguments holds in this process; nothing is imported."""
    return {"fla_npu": importlib.util.find_spec(FLA_NPU) is not None, "transfer": TRANSFER in sys.modules}


@hookimpl
def ascend_environment(command: str) -> dict[str, str]:
    """Return the defaults where torch_npu is installed."""
    return defaults(os.environ) if device.is_installed() else {}


@hookimpl
def ascend_preflight(run: "Run", arguments: "Arguments") -> list[Finding]:
    on_npu = arguments.training.device.type == "npu"
    return judge(os.environ, **loaded()) if on_npu else []
