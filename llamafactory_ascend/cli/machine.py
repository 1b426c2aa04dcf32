"""The machine under torch: device nodes, driver, CANN and ``npu-smi``, read from the file system alone."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamafactory_ascend.cli.diagnosis import Finding
from llamafactory_ascend.cli.npu_smi import Smi, parse

# Beside /dev/davinciN every process on an NPU opens these.
MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")
DRIVER = "usr/local/Ascend/driver"
TOOLKITS = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest")
SOURCED = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
MARKS = (".dockerenv", "run/.containerenv")  # of Docker, of Podman; containerd leaves none
VERSION = re.compile(r"^\s*version\s*[=:]\s*\[?([^\]\s]+)", re.IGNORECASE | re.MULTILINE)
TIMEOUT = 30  # seconds; npu-smi hangs where the driver does


@dataclass(frozen=True)
class Machine:
    """What was found.

    Attributes:
        devices: nodes of the cards, e.g. "/dev/davinci0".
        closed: nodes that this user may not open.
        managers: those of MANAGERS that are there.
        driver: the driver's version, None where its files are not visible.
        toolkit: the folder of CANN, "" where there is none.
        cann: its version, "" where it does not say.
        sourced: True where the shell has CANN's environment.
        container: True inside one.
        smi: what npu-smi said, None where it could not be asked.
        smi_problem: why not.
    """

    devices: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    managers: tuple[str, ...] = ()
    driver: str | None = None
    toolkit: str = ""
    cann: str = ""
    sourced: bool = False
    container: bool = False
    smi: Smi | None = None
    smi_problem: str = ""


def look(environment: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Read the file system under ``root`` and ask npu-smi, where there is any trace of an NPU."""
    nodes = [path for path in (root / "dev").glob("davinci*") if path.name[7:].isdigit()]
    nodes.sort(key=lambda path: int(path.name[7:]))
    named = next((environment[name] for name in SOURCED if environment.get(name)), "")
    toolkits = [Path(named)] if named else [root / folder for folder in TOOLKITS]
    toolkit = next((folder for folder in toolkits if _is_there(folder)), None)
    smi, problem = ask_npu_smi(environment) if nodes else (None, "")
    return Machine(
        devices=tuple(map(str, nodes)),
        closed=tuple(str(path) for path in nodes if not os.access(path, os.R_OK | os.W_OK)),
        managers=tuple(name for name in MANAGERS if _is_there(root / "dev" / name)),
        driver=_version(root / DRIVER, "version.info") if _is_there(root / DRIVER) else None,
        toolkit=str(toolkit or ""),
        cann=_version(toolkit, "version.cfg", "*/ascend_toolkit_install.info") if toolkit else "",
        sourced=bool(named),
        container="KUBERNETES_SERVICE_HOST" in environment or any(_is_there(root / name) for name in MARKS),
        smi=smi,
        smi_problem=problem,
    )


def _is_there(path: Path) -> bool:
    """True for what this user can see; what lies in another's home cannot be asked for, and raises."""
    with contextlib.suppress(OSError):
        return path.exists()
    return False


def _version(folder: Path, *patterns: str) -> str:
    """Return the version, "" where it is not said, or not to this user: the driver's files have a group."""
    for path in (path for pattern in patterns for path in sorted(folder.glob(pattern))):
        with contextlib.suppress(OSError):
            if found := VERSION.search(path.read_text(encoding="utf-8", errors="replace")):
                return found[1]
    return ""


def ask_npu_smi(environment: Mapping[str, str]) -> tuple[Smi | None, str]:
    """Run ``npu-smi info``.

    Returns:
        What it said and "", or None and why it said nothing.
    """
    command = shutil.which("npu-smi", path=environment.get("PATH", "") + ":/usr/local/bin:/usr/local/sbin")
    if command is None:
        return None, "npu-smi is not there"
    try:
        done = subprocess.run(
            [command, "info"], capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return None, f"npu-smi did not answer within {TIMEOUT} s: the driver hangs"
    except OSError as error:
        return None, f"npu-smi cannot be started: {error}"
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["it said nothing"]
        return None, f"npu-smi failed with code {done.returncode}: {lines[-1]}"
    return parse(done.stdout), ""


def judge(machine: Machine) -> list[Finding]:
    """Say what keeps a training off the NPUs of this machine. Asked where torch_npu or a card is there."""
    return [*_nodes(machine), *_software(machine), *_cards(machine)]


def _nodes(machine: Machine) -> list[Finding]:
    inside = machine.container
    if not machine.devices:
        where = "in this container" if inside else "on this machine"
        hint = (
            "start the container with --device /dev/davinci0 " + _flags(MANAGERS)
            if inside
            else "npu-smi info; is the driver loaded?"
        )
        return [Finding("warning", "device nodes", f"there is no /dev/davinci0 {where}", hint)]
    found = []
    if missing := [name for name in MANAGERS if name not in machine.managers]:
        nodes = ", ".join(f"/dev/{name}" for name in missing)
        hint = f"start the container with {_flags(missing)}" if inside else "reinstall the driver"
        found.append(Finding("warning", "device nodes", f"missing beside the cards: {nodes}", hint))
    if machine.closed:
        found.append(
            Finding(
                "warning",
                "device nodes",
                f"this user may not open {', '.join(machine.closed)}",
                "add the user to the group that owns them (ls -l /dev/davinci0), often HwHiAiUser",
            )
        )
    return found


def _flags(names: tuple[str, ...] | list[str]) -> str:
    return " ".join(f"--device /dev/{name}" for name in names)


def _software(machine: Machine) -> list[Finding]:
    found = []
    if machine.devices and machine.driver is None:
        hint = (
            "start the container with -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro"
            if machine.container
            else "install the driver of this card"
        )
        found.append(Finding("warning", "driver", f"/{DRIVER} is not there", hint))
    if not machine.toolkit:
        places = ", ".join(f"/{folder}" for folder in TOOLKITS)
        named = "the folder the environment names" if machine.sourced else places
        found.append(Finding("warning", "CANN", f"no toolkit in {named}", "install CANN, or use its image"))
    elif not machine.sourced:
        toolkit = Path(machine.toolkit)
        scripts = [toolkit / "set_env.sh", toolkit.parent / "set_env.sh"]
        script = next((path for path in scripts if path.exists()), scripts[0])
        message = f"{machine.toolkit} is there, but its environment is not set in this shell"
        found.append(Finding("warning", "CANN", message, f"source {script}"))
    return found


def _cards(machine: Machine) -> list[Finding]:
    if machine.smi is None:
        return [Finding("note", "npu-smi", machine.smi_problem)] if machine.smi_problem else []
    several = any(chip.index for chip in machine.smi.chips)  # chips on a card

    def named(number: int, index: int) -> str:
        return f"NPU {number}" + (f" chip {index}" if several else "")

    found = [
        Finding(
            "warning",
            named(chip.number, chip.index),
            f"its health is {chip.health}",
            f"npu-smi info -t health -i {chip.number}" + (f" -c {chip.index}" if several else ""),
        )
        for chip in machine.smi.chips
        if chip.health.upper() != "OK"
    ]
    for process in machine.smi.processes:
        message = f"used by process {process.pid} ({process.name}), {process.megabytes} MB"
        device = machine.smi.device(process.number, process.index)
        hint = f"end it, or leave device {device} out with ASCEND_RT_VISIBLE_DEVICES"
        found.append(Finding("warning", named(process.number, process.index), message, hint))
    if not machine.smi.chips:
        found.append(Finding("note", "npu-smi", "it printed no card in a form this version can read"))
    return found
