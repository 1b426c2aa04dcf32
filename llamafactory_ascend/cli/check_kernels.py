"""``llamafactory-ascend check kernels``: do the back ends of this machine compute what they should?"""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from llamafactory_ascend.device import Device
    from llamafactory_ascend.kernels.backends import Backend
    from llamafactory_ascend.kernels.offline import Verdict

EPILOG = """
Examples:

  llamafactory-ascend check kernels

  llamafactory-ascend check kernels --full --json > kernels.json

Exit codes: 0 every usable back end is right, 1 one is not, 2 torch cannot be imported or wrong usage.
"""


def kernels(
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Also the gated delta rule at [1, 4096, 48, 128], and its peak memory; minutes on a CPU.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON on stdout.")] = False,
) -> None:
    """Hold every back end that can be used here against a formula in float64, on random tensors.

    Outputs and the gradients of all inputs are compared in float32, bfloat16 and float16, without a model.
    """
    try:
        import torch  # noqa: F401
    except Exception as error:  # without its driver's libraries it raises whatever they raise
        typer.echo(f"error torch cannot be imported: {type(error).__name__}: {error}", err=True)
        typer.echo("type: llamafactory-ascend doctor", err=True)
        raise typer.Exit(2) from None
    from llamafactory_ascend import device, plugins
    from llamafactory_ascend.kernels import offline
    from llamafactory_ascend.kernels.selection import Conditions

    here = device.decide()
    found = plugins.manager().hook.ascend_kernels()
    usable, refused = offline.sort_out(
        (one for backends in found for one in backends), Conditions(here.type, here.name)
    )
    verdicts = run(usable, here.type, full)
    if as_json:
        typer.echo(json.dumps(as_dict(here, verdicts, refused), ensure_ascii=False, indent=2))
    else:
        show(here, verdicts, refused)
    raise typer.Exit(0 if all(verdict.passed for verdict in verdicts) else 1)


def run(usable: "list[Backend]", device: str, full: bool) -> "list[Verdict]":
    """Check every back end with every case and dtype, showing how far it is on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from llamafactory_ascend.kernels import offline
    from llamafactory_ascend.kernels.offline_cases import FULL, all_cases

    pairs = [(backend, case) for backend in usable for case in all_cases() if offline.suits(backend, case)]
    large = [backend for backend in usable if full and backend.operator == "gated_delta_rule"]
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    verdicts = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(pairs) * len(offline.LIMITS) + len(large))
        for backend, case in pairs:
            bar.update(task, description=f"{backend.operator} {backend.name}: {case.name}")
            for dtype in offline.LIMITS:
                verdicts.append(offline.check(backend, case, dtype, device))
                bar.advance(task)
        for backend in large:
            bar.update(task, description=f"{backend.operator} {backend.name}: {FULL}, this may take minutes")
            verdicts.append(offline.check_full_size(backend, device))
            bar.advance(task)
    return verdicts


def as_dict(
    here: "Device", verdicts: "list[Verdict]", refused: "list[tuple[Backend, str]]"
) -> dict[str, Any]:
    """Return the whole answer as plain data."""
    return {
        "device": {"type": here.type, "name": here.name, "simulated": here.simulated},
        "ok": all(verdict.passed for verdict in verdicts),
        "verdicts": [verdict.as_dict() for verdict in verdicts],
        "not_usable": [
            {"operator": backend.operator, "backend": backend.name, "reason": reason}
            for backend, reason in refused
        ],
    }


def show(here: "Device", verdicts: "list[Verdict]", refused: "list[tuple[Backend, str]]") -> None:
    """Print the table, what cannot be used here, every problem, and the verdict last."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 110  # a file or a pipe has none of its own
    console = Console(file=sys.stdout, highlight=False, width=width)
    simulated = "; a simulated NPU: its numerics are no Ascend kernel's" if here.simulated else ""
    typer.echo(f"device {here.type} {here.name}{simulated}")
    console.print(table(verdicts))
    for backend, reason in refused:
        typer.echo(f"not usable {backend.operator} {backend.name}: {reason}")
    wrong = [verdict for verdict in verdicts if not verdict.passed]
    for verdict in wrong:
        typer.echo(
            f"error {verdict.operator} {verdict.backend}, {verdict.case}, {verdict.dtype}: {problem(verdict)}"
        )
    if wrong:
        names = dict.fromkeys(f"{verdict.operator}: {verdict.backend}" for verdict in wrong)
        typer.echo(f"wrong: {', '.join(names)}; name another back end, or `off`, under `ascend.kernels`")
    else:
        typer.echo(f"all right: {len(verdicts)} comparisons")


def table(verdicts: "list[Verdict]") -> "Table":
    """Return a row for each operator, back end and case: the worst distance in each dtype."""
    from rich.table import Table

    from llamafactory_ascend.kernels.offline import LIMITS

    found = Table(title="relative L2 distance, the worst of output and input gradients", title_justify="left")
    found.add_column("operator", overflow="fold")
    found.add_column("back end", overflow="fold")
    found.add_column("case")
    for dtype, limit in LIMITS.items():
        found.add_column(f"{dtype}\n<= {limit:g}", justify="right")
    peaks = any(verdict.peak is not None for verdict in verdicts)
    if peaks:
        found.add_column("peak", justify="right")
    rows: dict[tuple[str, str, str], dict[str, Verdict]] = {}
    for verdict in verdicts:
        rows.setdefault((verdict.operator, verdict.backend, verdict.case), {})[verdict.dtype] = verdict
    for names, by_dtype in rows.items():
        cells = [cell(by_dtype.get(dtype)) for dtype in LIMITS]
        peak = next((v.peak for v in by_dtype.values() if v.peak is not None), None)
        cells += [f"{peak / 2**20:,.0f} MiB" if peak is not None else ""] if peaks else []
        found.add_row(*names, *cells)
    return found


def cell(verdict: "Verdict | None") -> str:
    if verdict is None:
        return ""
    if verdict.failure:
        return "[red]failed[/]"
    text = f"{verdict.worst[1]:.1e}"
    return text if verdict.passed else f"[red]{text}[/]"


def problem(verdict: "Verdict") -> str:
    if verdict.failure:
        return verdict.failure
    name, error = verdict.worst
    return f"{name} is off by {error:.2g}, the limit is {verdict.limit:g}"
