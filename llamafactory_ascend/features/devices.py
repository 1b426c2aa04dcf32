"""Which cards a run may use: one for each rank, and no CPU in the place of an NPU that is not there."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llamafactory_ascend import device
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from llamafactory_ascend.device import Device
    from llamafactory_ascend.run import Arguments, Run

ON = {"true", "y", "1"}  # as the host reads its switches
COUNTED = {
    "auto",
    "cpu",
    "gpu",
    "xpu",
}  # what torchrun takes in the place of a number


def number(text: str) -> int:
    """Return the number that a variable of torchrun holds, 1 where it is unset or none."""
    return int(text) if text.isdecimal() else 1


def local_ranks(environment: Mapping[str, str]) -> int:
    """Return how many ranks this node has."""
    return number(environment.get("LOCAL_WORLD_SIZE", ""))


def launched_ranks(devices: int, environment: Mapping[str, str]) -> int:
    """Return how many ranks torchrun would have on all nodes together, as the host's launcher starts it.

    Args:
        devices: visible here; so many ranks has a node unless NPROC_PER_NODE says otherwise.
    """
    asked = environment.get("NPROC_PER_NODE", "")
    names = ("NNODES", "MAX_NNODES") if "RDZV_ID" in environment else ("NNODES",)
    nodes = max(number(environment.get(name, "")) for name in names)
    return nodes * (number(asked) if asked.isdecimal() else max(1, devices))


def judge_presence(setting: str, installed: bool, found: "Device", use_cpu: bool) -> list[Finding]:
    """Refuse a run that would not be on the device it was written for.

    Args:
        setting: `ascend.device`.
        installed: torch_npu is installed.
        found: what can be used.
        use_cpu: the recipe asks for a CPU.
    """
    if found.type == "npu" and not use_cpu:
        return []
    if setting == "npu":
        why = "`use_cpu: true`" if use_cpu else found.reason
        message = (
            f"the recipe says `ascend.device: npu`, but there is no NPU to use: {why}. "
            "See `npu-smi info` and `llamafactory-ascend doctor`, or write `ascend: {device: any}`"
        )
        return [Finding("error", "device", message)]
    if setting == "auto" and installed and found.type == "cpu" and not use_cpu:
        message = (
            f"this would train on the CPU: {found.reason}. See `npu-smi info` and "
            "`llamafactory-ascend doctor`; a CPU is meant with `use_cpu: true` or `ascend: {device: any}`"
        )
        return [Finding("error", "device", message)]
    return []


def judge_ranks(ranks: int, where: str, visible: int, environment: Mapping[str, str]) -> list[Finding]:
    """Refuse more ranks on a node than it has cards; stock fails with "invalid device" on rank ``visible``.

    Args:
        ranks: of this node.
        where: the variable that says so.
        visible: cards that can be used.
    """
    if ranks <= visible or not visible:
        return []
    text = environment.get(device.VISIBLE, "")
    limit = f" ({device.VISIBLE}={text})" if text else ""
    message = (
        f"{where} asks for {ranks} ranks on this node, but {visible} "
        f"NPU{' is' if visible == 1 else 's are'} visible{limit}; "
        f"set {'NPROC_PER_NODE' if where == 'NPROC_PER_NODE' else 'the number of processes'} to {visible}"
        + (f", or name more in {device.VISIBLE}" if text else "")
    )
    return [Finding("error", "device", message)]


def judge_visible(environment: Mapping[str, str]) -> list[Finding]:
    """Warn of a list of devices that CANN reads otherwise than it is meant."""
    text = environment.get(device.VISIBLE, "")
    ids = device.visible_ids(text)
    if text and ",".join(map(str, ids)) != text:
        message = f"{device.VISIBLE}={text!r}: CANN reads it up to what is no digit or comma: {ids}"
        return [Finding("warning", "device", message)]
    if ids != sorted(set(ids)):
        return [Finding("warning", "device", f"{device.VISIBLE}={text}: CANN takes ascending ids only")]
    return []


def judge_launch(visible: int, environment: Mapping[str, str]) -> list[Finding]:
    """Judge the ranks that the host's launcher is about to start, or not to start, on this node."""
    asked = environment.get("NPROC_PER_NODE")
    torchrun = environment.get("FORCE_TORCHRUN", "").lower() in ON or visible > 1
    if asked is None or not visible or asked in COUNTED:
        return []
    if not asked.isdecimal() or int(asked) < 1:
        if not torchrun:
            return []  # nobody reads it
        message = (
            f"NPROC_PER_NODE={asked!r}: torchrun takes a number of ranks, at least 1; unset it for one rank "
            f"on each of the visible NPUs, {visible}"
        )
        return [Finding("error", "device", message)]
    if torchrun:
        return judge_ranks(int(asked), "NPROC_PER_NODE", visible, environment)
    if int(asked) > 1:
        message = (
            f"NPROC_PER_NODE={asked} has no effect: one NPU is visible, so the host starts one process; "
            f"see {device.VISIBLE}"
        )
        return [Finding("warning", "device", message)]
    return []


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    used = arguments.training.device
    found = device.decide(used.type)
    size = f", {found.memory / 2**30:.0f} GiB" if found.memory else ""
    named = f"{found.name}, {used} of {found.count} visible{size}" if found.type != "cpu" else found.name
    run.decide("device", named, found.reason)


@hookimpl
def ascend_preflight(run: "Run", arguments: "Arguments") -> list[Finding]:
    return judge_visible(os.environ) if arguments.training.device.type == "npu" else []
