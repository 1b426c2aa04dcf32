"""``llamafactory-ascend data ls``: every data set that a recipe can name, and where it comes from."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamafactory_ascend.cli import failures
from llamafactory_ascend.errors import AscendError

if TYPE_CHECKING:
    from llamafactory_ascend.checks.data.catalogue import Catalogue, Entry

EPILOG = """
Examples:

  llamafactory-ascend data ls --dataset-dir data

  llamafactory-ascend data ls --json | jq -r '.[].name'

Exit codes: 0 listed, 2 a dataset_info.json cannot be read.
"""
ORIGINS = {
    "yours": "dataset_dir",
    "settings": "ascend.dataset_info",
    "plugin": "a plugin",
    "shipped": "shipped",
}


def ls(
    dataset_dir: Annotated[Path, typer.Option(help="Holds dataset_info.json.")] = Path("data"),
    dataset_info: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="As `ascend.dataset_info`; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON on stdout.")] = False,
) -> None:
    """List every data set: those of dataset_dir, of fragments over it, of plugins, and the shipped ones."""
    from llamafactory_ascend.features import data_checks

    with failures.told():
        found = data_checks.catalogue(dataset_dir, dataset_info or [])
        listed = [as_dict(found, entry) for entries in found.entries.values() for entry in entries]
    if as_json:
        typer.echo(json.dumps(listed, ensure_ascii=False, indent=2))
    else:
        show(listed)
        if found.missing:
            typer.echo(f"{found.missing} does not exist")
    for warning in found.warnings:
        typer.echo(f"warning {warning}", err=True)


def as_dict(found: "Catalogue", entry: "Entry") -> dict[str, Any]:
    """Return an entry as plain data; ``rows`` is None where counting takes long, or is in vain."""
    from llamafactory_ascend.checks.data import tables

    keys = entry.keys if isinstance(entry.keys, Mapping) else {}
    path = entry.path
    return {
        "name": entry.name,
        "origin": ORIGINS[entry.source.origin],
        "formatting": keys.get("formatting", "alpaca"),
        "rows": tables.count(path) if path else None,
        "data": str(path) if path else next(iter(keys.values()), ""),
        "place": entry.place,
        "remark": remark(found, entry),
    }


def remark(found: "Catalogue", entry: "Entry") -> str:
    """Say why an entry cannot be named, or that its file is missing; "" where it can be used."""
    try:
        meant = found.find(entry.name)
    except AscendError as error:
        return error.what.partition("\n")[0].rstrip(":")
    if meant is not entry:
        return f"not used: {meant.place} has the same name"
    there = entry.path is None or os.path.exists(entry.path)  # noqa: PTH110 - False for any broken name
    return "" if there else "its file does not exist"


def show(listed: list[dict[str, Any]]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    width = None if sys.stdout.isatty() else 140  # a file or a pipe has none of its own
    table = Table(title="data sets: `dataset: NAME` in a recipe", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("rows", justify="right")
    for column in ("formatting", "from", "data", "remark"):
        table.add_column(column, overflow="fold")
    for one in listed:
        rows = "?" if one["rows"] is None else f"{one['rows']:,}"
        cells = (one["name"], rows, str(one["formatting"]), one["origin"], str(one["data"]), one["remark"])
        table.add_row(*(escape(cell) for cell in cells))
    Console(file=sys.stdout, highlight=False, width=width).print(table)
