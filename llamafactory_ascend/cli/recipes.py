"""``llamafactory-ascend recipes``: the recipes that travel with the package."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from llamafactory_ascend import recipe_text, resources
from llamafactory_ascend.cli import failures
from llamafactory_ascend.errors import AscendError

EPILOG = """
Examples:

  llamafactory-ascend recipes ls

  llamafactory-ascend recipes cp qwen2_5_7b_lora_sft my.yaml

  llamafactory-cli train ascend:qwen2_5_7b_lora_sft output_dir=saves/first

Exit codes: each command's --help says what they mean.
"""
LS_EPILOG = """
Examples:

  llamafactory-ascend recipes ls

  llamafactory-ascend recipes ls --json | jq -r '.[].name'

Exit code: 0.
"""
CAT_EPILOG = """
Examples:

  llamafactory-ascend recipes cat qwen2_5_7b_lora_sft

  llamafactory-ascend recipes cat qwen2_5_7b_lora_sft | grep learning_rate

Exit codes: 0 printed, 2 no such recipe.
"""
CP_EPILOG = """
Examples:

  llamafactory-ascend recipes cp qwen2_5_7b_lora_sft my.yaml

  llamafactory-ascend recipes cp qwen2_5_7b_lora_sft recipes/ lora_rank=16 learning_rate=5e-5

  llamafactory-ascend recipes cp qwen2_5_7b_lora_sft my.yaml ascend.strict=true --force

Exit codes: 0 written, 2 nothing was written: no such recipe, a broken override, or the file is there already.
"""

app = typer.Typer(help="List, print and copy the shipped recipes.", no_args_is_help=True, epilog=EPILOG)
Name = Annotated[str, typer.Argument(metavar="NAME", help="As `recipes ls` prints it.")]


@app.callback()
def recipes() -> None:
    """List, print and copy the shipped recipes."""


@app.command("ls", epilog=LS_EPILOG)
def ls(
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON on stdout.")] = False,
) -> None:
    """List every shipped recipe with what its header says: model, cards, what it is for."""
    found = [as_dict(name, Path(str(file))) for name, file in resources.recipes().items()]
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        show(found)


def as_dict(name: str, file: Path) -> dict[str, Any]:
    """Return a recipe's name, the host's command that reads it, its file and its header as plain data."""
    text = file.read_text(encoding="utf-8")
    header = recipe_text.read_header(text)
    command = "export" if "\nexport_dir:" in text else "train"
    return {"name": name, "command": command, "title": header.title, "file": str(file), **header.fields}


def show(found: list[dict[str, Any]]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    width = None if sys.stdout.isatty() else 140  # a file or a pipe has none of its own
    table = Table(title="shipped recipes: llamafactory-cli train ascend:NAME", title_justify="left")
    table.add_column("name", no_wrap=True)
    for column in ("what", "cards"):
        table.add_column(column, overflow="fold")
    for one in found:
        table.add_row(one["name"], escape(one["title"]), escape(one.get("cards", "")))
    Console(file=sys.stdout, highlight=False, width=width).print(table)


@app.command("cat", epilog=CAT_EPILOG)
def cat(name: Name) -> None:
    """Print a shipped recipe as it is."""
    typer.echo(find(name).read_text(encoding="utf-8"), nl=False)


@app.command("cp", epilog=CP_EPILOG)
def cp(
    name: Name,
    target: Annotated[
        str, typer.Argument(metavar="DEST", help="A .yaml file, or a folder; missing folders are made.")
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Written into the copy.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace DEST; what was there is kept beside it as DEST.bak.")
    ] = False,
) -> None:
    """Copy a shipped recipe, comments and all, with overrides written into it; replace nothing unasked."""
    source = find(name)
    path = Path(target)
    if path.is_dir() or target.endswith(("/", os.sep)):
        path = path / source.name
    with failures.told(path):
        if path.suffix not in (".yaml", ".yml"):
            raise AscendError(f"{path}: the host reads recipes from .yaml files only", f"name it {path}.yaml")
        text, changes = recipe_text.override(source.read_text(encoding="utf-8"), words or [])
        check_keys(text, changes, name)
        backup = write(path, text, force)
    for change in changes:
        before = "not in the recipe before" if change.before is None else f"was {change.before}"
        typer.echo(f"{change.key}: {change.after} ({before})")
    if backup is not None:
        typer.echo(f"what was there is in {backup}")
    typer.echo(f"wrote {path}")


def find(name: str) -> Path:
    with failures.told():
        return resources.recipe(name.removeprefix("ascend:"))


def check_keys(text: str, changes: "list[recipe_text.Change]", name: str) -> None:
    """Refuse overrides that no training would take; the host is asked only for a key of no shipped recipe.

    Raises:
        AscendError: a key that is unknown, with the nearest known one, or a value that the `ascend:` block
            cannot have.
    """
    from llamafactory_ascend import settings

    _, block = settings.take(yaml.safe_load(text))
    settings.read(block, name)
    known = {key for file in resources.recipes().values() for key in yaml.safe_load(file.read_text("utf-8"))}
    keys = {change.key.partition(".")[0] for change in changes} - known - {"ascend"}
    if not keys:
        return
    from llamafactory_ascend.host import argument_types

    argument_types.refuse_unknown(argument_types.training_classes(), keys)


def write(path: Path, text: str, force: bool) -> Path | None:
    """Write a file at once; one that is there stays, or with ``force`` moves aside.

    Returns:
        Where the file that was there is now, None if there was none.

    Raises:
        AscendError: the file is there, and ``force`` is not given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        whole = Path(scratch) / path.name
        whole.write_text(text, encoding="utf-8")  # a full disk is found before anything has changed
        backup = _move_aside(path) if force and path.exists() else None
        try:
            path.touch(exist_ok=False)  # ours from here on, whoever else is at it
        except FileExistsError:
            raise AscendError(
                f"{path} is there already; nothing was written", "name another file, or add --force"
            ) from None
        whole.replace(path)
    return backup


def _move_aside(path: Path) -> Path:
    backup, number = path.with_name(f"{path.name}.bak"), 1
    while backup.exists():
        number += 1
        backup = path.with_name(f"{path.name}.bak{number}")
    path.rename(backup)
    return backup
