"""The report as a table in the log."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 1 << 20


def show(report: dict[str, Any], path: Path) -> None:
    """Print the report on stderr, where the host logs."""
    if report:
        # A log file is not a terminal: without a width rich would fold the table at 80 columns.
        console = Console(stderr=True, highlight=False, width=110 if not Console(stderr=True).is_terminal else None)
        console.print(render(report, path))


def render(report: dict[str, Any], path: Path) -> Table:
    """Return the table: a line for each thing a reader asks after a run."""
    table = Table(title=f"llamafactory-ascend: {report['state']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows(report):
        table.add_row(name, value)
    table.add_row("report", str(path))
    return table


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of each line."""
    device = report["device"]
    found = [
        ("steps", f"{report['last_step']} of {report['max_steps'] or '?'}"),
        ("device", f"{device['count']} x {device['name']}" + (" (simulated NPU)" if device["simulated"] else "")),
    ]
    if report["explanation"]:
        found.append(("explanation", report["explanation"]))
    for name, decision in report["decisions"].items():
        found.append((name, f"{decision['choice']} ({decision['reason']})"))
    for rank in report["ranks"]:
        found += _rank_rows(rank)
    off = [patch for patch in report["patches"] if patch["state"] in ("planned", "failed")]
    found.append(("patches", f"{len(report['patches']) - len(off)} in place"))
    found += [(f"patch {patch['id']}", f"{patch['state']}: {patch['reason']}") for patch in off]
    found += [(finding["level"], f"{finding['subject']}: {finding['message']}") for finding in report["findings"]]
    return found


def _rank_rows(rank: dict[str, Any]) -> list[tuple[str, str]]:
    name = f"rank {rank['rank']}"
    found = []
    if counts := rank.get("checkpointing"):
        parts = [
            f"{component} {counts['checkpointed'].get(component, 0)} of {counts['expected'][component]} expected"
            f" ({total} layers)"
            for component, total in counts["layers"].items()
        ]
        found.append((f"{name} checkpointed", ", ".join(parts)))
    if memory := rank.get("memory"):
        peak = f"{memory['peak_allocated'] / MIB:.1f} MiB allocated, {memory['peak_reserved'] / MIB:.1f} MiB reserved"
        found.append((f"{name} peak", peak))
    return found
