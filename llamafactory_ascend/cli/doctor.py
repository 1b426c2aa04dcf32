"""``llamafactory-ascend doctor``: is this installation sound, is the plugin on, does every patch fit?"""

import importlib.metadata
import importlib.util
import json
import os
import platform
from typing import Any

import typer

from llamafactory_ascend import __version__
from llamafactory_ascend.cli import compatibility, imports, machine, variables
from llamafactory_ascend.cli.compatibility import UNKNOWN
from llamafactory_ascend.cli.diagnosis import Diagnosis, Surroundings, judge
from llamafactory_ascend.cli.stages import collect

EPILOG = """
Examples:

  llamafactory-ascend doctor

  llamafactory-ascend doctor --json | jq .findings

  llamafactory-ascend doctor && llamafactory-cli train train.yaml

Exit codes: 0 nothing to do, 1 findings (training works, something is off), 2 broken (torch, the host or the
plugin cannot be loaded).
"""

TIMEOUT = 300  # seconds; a cold import from a network disk takes minutes
SWITCHES = ("LLAMAFACTORY_ASCEND", "LLAMAFACTORY_ASCEND_PLUGINS", "TORCH_DEVICE_BACKEND_AUTOLOAD")
DISTRIBUTIONS = (
    "llamafactory", "llamafactory-kt", "torch", "torch_npu", "torchvision", "transformers", "peft",
    "accelerate", "trl", "datasets", "deepspeed", "triton", "triton-ascend", "flash-linear-attention",
    "wrapt", "pluggy", "pydantic",
)  # fmt: skip


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print the diagnosis as JSON on stdout."),
) -> None:
    """Say whether this installation is sound, whether the plugin is on, and how each of its patches stands.

    torch and the host are imported in a process of their own, so a broken one is named, not suffered.
    """
    diagnosis = examine()
    if as_json:
        typer.echo(json.dumps(diagnosis.as_dict(), indent=2))  # ASCII: a value may be no text at all
    else:
        show(diagnosis)
    raise typer.Exit(int(diagnosis.exit_code))


def examine() -> Diagnosis:
    """Look at the environment of this Python, as a fresh process sees it."""
    around = Surroundings(
        environment={name: os.environ[name] for name in SWITCHES if name in os.environ},
        wrapt=importlib.util.find_spec("wrapt") is not None,
        entry_point=any(
            entry.value.startswith("llamafactory_ascend.")
            for entry in importlib.metadata.entry_points(group="torch.backends")
        ),
    )
    versions, probe = _distributions(), collect("llamafactory_ascend.host.probe", (), TIMEOUT)
    seen = [*compatibility.judge(versions, compatibility.requirements()), *imports.judge(versions, probe)]
    found = machine.look(os.environ)
    device = probe.value("device") or {}
    if not device.get("simulated") and ("torch_npu" in versions or found.devices):
        seen += machine.judge(found)
    settings = variables.collect(os.environ, probe.value("environment") or {})
    return judge(versions, around, probe, seen, found, settings)


def _distributions() -> dict[str, str]:
    """Versions from the metadata alone: right even where nothing can be imported."""
    found = {"python": platform.python_version(), "llamafactory-ascend-plugin": __version__}
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = version or UNKNOWN  # what an interrupted pip leaves has no metadata
    return found


def show(diagnosis: Diagnosis) -> None:
    """Print the diagnosis on stdout."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)  # a pipe has no width, and 80 columns fold every line

    about = Table(show_header=False, box=None, pad_edge=False)
    about.add_column(style="bold")
    about.add_column(overflow="fold")
    about.add_row(
        "versions", escape(", ".join(f"{name} {version}" for name, version in diagnosis.versions.items()))
    )
    about.add_row("device", escape(_device(diagnosis.device)))
    if diagnosis.machine is not None and (diagnosis.machine.devices or diagnosis.machine.toolkit):
        about.add_row("machine", escape(_machine(diagnosis.machine)))
    about.add_row("plugin", escape(f"{'on' if diagnosis.active else 'off'}: {diagnosis.activation}"))
    about.add_row("third-party plugins", escape(", ".join(diagnosis.plugins) or "none"))
    console.print(about)

    if diagnosis.patches:
        table = Table(title="patches", title_justify="left")
        for column in ("patch", "state", "source of the host", "replaces"):
            table.add_column(column, overflow="fold")
        for patch in diagnosis.patches:
            cells = (patch["id"], patch["state"], patch["source"] or "not in this host", patch["target"])
            table.add_row(*(escape(cell) for cell in cells))
        console.print(table)

    if diagnosis.variables:
        table = Table(title="environment of a training", title_justify="left")
        for column in ("variable", "value", "set by"):
            table.add_column(column, overflow="fold")
        for variable in diagnosis.variables:
            table.add_row(escape(variable.name), escape(variables.shown(variable.value)), variable.setter)
        console.print(table)

    colour = {"error": "red", "warning": "yellow", "note": "cyan"}
    for finding in diagnosis.findings:
        console.print(
            f"[{colour[finding.level]}]{finding.level}[/] {escape(f'{finding.subject}: {finding.message}')}"
        )
        if finding.hint:
            console.print(f"  next: {escape(finding.hint)}")
    console.print(f"[bold]{SUMMARY[diagnosis.exit_code]}[/]")


SUMMARY = {0: "ok", 1: "findings: training works, something above is off", 2: "broken: see the errors above"}


def _device(device: Any) -> str:
    if device is None:
        return "unknown: torch cannot be imported"
    simulated = ", simulated NPU" if device["simulated"] else ""
    return f"{device['count']} x {device['name']} ({device['type']}{simulated}): {device['reason']}"


def _machine(found: machine.Machine) -> str:
    cards = f"{len(found.devices)} device nodes"
    driver = f"driver {found.driver or 'of unknown version'}" if found.driver is not None else "no driver"
    cann = f"CANN {found.cann or 'of unknown version'} in {found.toolkit}" if found.toolkit else "no CANN"
    return ", ".join([cards, driver, cann, "in a container" if found.container else "not in a container"])
