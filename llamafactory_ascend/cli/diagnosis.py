"""The diagnosis of an installation: what the probe saw, judged. Pure data in, pure data out."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from llamafactory_ascend.cli.machine import Machine
    from llamafactory_ascend.cli.variables import Variable

OWN_STAGES = (
    "device",
    "versions",
    "plugins",
    "environment",
    "patches",
    "findings",
)  # the others are modules to import

Level = Literal["note", "warning", "error"]


class Exit(IntEnum):
    """Exit codes of ``doctor``."""

    OK = 0
    FINDINGS = 1
    BROKEN = 2


@dataclass(frozen=True)
class Finding:
    """One thing to know. `error`: training or the plugin is broken; `warning`: something is off."""

    level: Level
    subject: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What the parent process knows without importing anything heavy.

    Attributes:
        environment: the variables that matter, as the user's shell sets them.
        wrapt: True where wrapt can be imported.
        entry_point: True where the plugin's entry point is registered.
    """

    environment: Mapping[str, str]
    wrapt: bool
    entry_point: bool


@dataclass(frozen=True)
class Probe:
    """What came of the probe process.

    Attributes:
        stages: the lines it wrote, one dict each.
        code: its exit code, negative where a signal ended it; None where it did not end in time.
        stderr: what it said.
    """

    stages: Sequence[Mapping[str, Any]]
    code: int | None
    stderr: str

    def value(self, stage: str) -> Any:
        """Return what a stage found, None where it never came to an end."""
        return next((s["value"] for s in self.stages if s["stage"] == stage and s["state"] == "done"), None)

    def failed(self) -> list[Mapping[str, Any]]:
        """Return the stages that raised."""
        return [stage for stage in self.stages if stage["state"] == "failed"]

    def unfinished(self) -> str:
        """Return the stage in which the process died, "" where it came to its end."""
        begun = [stage["stage"] for stage in self.stages if stage["state"] == "begun"]
        ended = {stage["stage"] for stage in self.stages if stage["state"] != "begun"}
        return next((stage for stage in begun if stage not in ended), "")


@dataclass(frozen=True)
class Diagnosis:
    """Everything ``doctor`` prints."""

    versions: Mapping[str, str]
    device: Mapping[str, Any] | None
    active: bool
    activation: str
    plugins: Sequence[str]
    patches: Sequence[Mapping[str, Any]]
    machine: "Machine | None" = None
    variables: "Sequence[Variable]" = ()
    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> Exit:
        levels = {finding.level for finding in self.findings}
        return Exit.BROKEN if "error" in levels else Exit.FINDINGS if "warning" in levels else Exit.OK

    def as_dict(self) -> dict[str, Any]:
        """Return the plain data, for JSON."""
        return {**asdict(self), "exit_code": int(self.exit_code)}


def judge(
    versions: Mapping[str, str],
    around: Surroundings,
    probe: Probe,
    seen: Sequence[Finding] = (),
    machine: "Machine | None" = None,
    variables: "Sequence[Variable]" = (),
) -> Diagnosis:
    """Turn what was seen into findings, the worst first; ``seen`` are those of other judges."""
    active, activation = _activation(around, probe)
    patches = probe.value("patches") or []
    findings = [
        *_broken(probe),
        *_inactive(around, active, activation, probe),
        *_said(probe),
        *seen,
        *_device(probe.value("device"), versions),
        *(finding for patch in patches for finding in _patch(patch)),
    ]
    untested = [patch["id"] for patch in patches if patch["source"] == "changed, untested"]
    if untested:
        message = (
            f"{len(untested)} of {len(patches)} replace functions whose source is none of the tested ones"
        )
        findings.append(Finding("note", "patches", message))
    order = ("error", "warning", "note")
    return Diagnosis(
        versions=probe.value("versions") or versions,
        device=probe.value("device"),
        active=active,
        activation=activation,
        plugins=probe.value("plugins") or [],
        patches=patches,
        machine=machine,
        variables=variables,
        findings=sorted(findings, key=lambda finding: order.index(finding.level)),
    )


def _activation(around: Surroundings, probe: Probe) -> tuple[bool, str]:
    torch = probe.value("torch")
    if torch is None:
        return False, "`import torch` fails"
    if torch["active"]:
        return True, "`import torch` ran the entry point"
    switch = around.environment.get("LLAMAFACTORY_ASCEND", "")
    if switch.strip().lower() in {"0", "false", "off", "no"}:
        return False, f"switched off by LLAMAFACTORY_ASCEND={switch}"
    if around.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return False, "switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0, which stops every back end of torch"
    if not around.entry_point:
        return False, "the entry point is not registered: the package is importable but not installed"
    return False, "`import torch` did not run the entry point"


def _inactive(around: Surroundings, active: bool, activation: str, probe: Probe) -> list[Finding]:
    found = []
    if not active and probe.value("torch") is not None:
        switched = activation.startswith("switched off")
        hint = (
            "unset the variable to switch the plugin on"
            if switched
            else "pip install --force-reinstall --no-deps llamafactory-ascend-plugin"
        )
        found.append(Finding("warning" if switched else "error", "activation", activation, hint))
    if not around.wrapt:
        found.append(
            Finding(
                "error",
                "activation",
                "the package wrapt is missing, so no patch can be applied",
                "pip install wrapt",
            )
        )
    return found


def _broken(probe: Probe) -> list[Finding]:
    found = [_explain(stage) for stage in probe.failed()]
    if stage := probe.unfinished():
        how = "did not end in time" if probe.code is None else f"ended the process with code {probe.code}"
        last = probe.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        found.append(
            Finding(
                "error",
                stage,
                f"looking at it {how}; last line: {last[0]}",
                f'try: python -c "import {stage}"',
            )
        )
    elif not probe.stages:
        found.append(Finding("error", "doctor", f"the probe did not start: {probe.stderr.strip()[-500:]}"))
    return found


def _explain(stage: Mapping[str, Any]) -> Finding:
    name, error = str(stage["stage"]), str(stage["error"])
    where = f" (at {stage['frame']})" if stage["frame"] else ""
    if name == "torch" and "backend extension: torch_npu" in error:
        hint = "torch_npu cannot load; is CANN there, and its set_env.sh sourced in this shell?"
    elif "No module named" in error:
        hint = "install what is missing, in the versions this host asks for"
    else:
        hint = f'see all of it with: python -c "import {name}"'
    what = "doctor cannot read them" if name in OWN_STAGES else "import fails"
    return Finding("error", name, f"{what}: {error}{where}", hint)


def _said(probe: Probe) -> list[Finding]:
    """What the plugin itself complained of while it was loaded: third parties' plugins, mostly."""
    found = [Finding(f["level"], f["subject"], f["message"]) for f in probe.value("findings") or []]
    mark = "[llamafactory-ascend] off"
    lines = [line for line in probe.stderr.splitlines() if line.startswith(mark)]
    return found + [Finding("error", "activation", line.partition("] ")[2]) for line in lines]


def _device(device: Mapping[str, Any] | None, versions: Mapping[str, str]) -> list[Finding]:
    if device is None or device["type"] == "npu":
        return []
    if "torch_npu" in versions:
        return [
            Finding(
                "warning",
                "device",
                f"training would run on {device['type']}: {device['reason']}",
                "npu-smi info",
            )
        ]
    message = f"no NPU: {device['reason']}. The device-neutral features work, everything else is stock"
    return [Finding("note", "device", message)]


def _patch(patch: Mapping[str, Any]) -> list[Finding]:
    if patch["state"] == "failed":
        return [
            Finding(
                "warning",
                f"patch {patch['id']}",
                f"not applied: {patch['reason']}",
                "update the plugin or pin the host",
            )
        ]
    if patch["state"] == "planned":
        message = f"{patch['target']} was not found in this host"
        return [Finding("warning", f"patch {patch['id']}", message, "update the plugin or pin the host")]
    return []
