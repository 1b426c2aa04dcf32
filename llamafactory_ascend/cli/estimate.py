"""``llamafactory-ascend estimate``: what would a training hold on a card, and what would fit on it?"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from llamafactory_ascend.cli.check_recipe import SHIPPED, cause
from llamafactory_ascend.cli.stages import collect

EPILOG = """
Examples:

  llamafactory-ascend estimate train.yaml

  llamafactory-ascend estimate ascend:qwen2_5_7b_lora_sft cutoff_len=8192 --memory 32GiB

  llamafactory-ascend estimate ascend:qwen3_8_27b_lora_sft_fsdp2 --cards 8

  llamafactory-ascend estimate train.yaml ascend.loss=off --json | jq .peak

Exit codes: 0 it fits, 1 it does not fit on the card, 2 it cannot be estimated, or wrong usage.
"""

TIMEOUT = 1800  # seconds
UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def size(text: str) -> int:
    """Return the bytes that a text like 64GiB or 60 GB says.

    Raises:
        BadParameter: it says nothing like that.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not found or found[2].lower() not in UNITS:
        raise typer.BadParameter(f"{text!r} is no size; write 64GiB, for example")
    return int(float(found[1]) * UNITS[found[2].lower()])


def estimate(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A .yaml, .yml or .json file, or ascend:NAME of a shipped one."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="As llamafactory-cli train takes them."),
    ] = None,
    cards: Annotated[
        int | None,
        typer.Option(min=1, help="Cards that train together; as the environment says, if left out."),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            parser=size, metavar="SIZE", help="Memory of a card, e.g. 64GiB; the device's, if left out."
        ),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(min=0, help="Pictures in a row; one where the data sets have pictures, if left out."),
    ] = None,
    fits: Annotated[
        bool, typer.Option(help="Look what would fit as well; it takes a few times as long.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the estimate as JSON on stdout.")] = False,
) -> None:
    """Estimate the device memory of a training: what each card holds, from loading to saving.

    The model is built without weights and a step of it is gone through; a model that is not in a local folder
    has its config and tokenizer fetched, nothing more. Rows are as long as cutoff_len, all of it supervised.
    """
    if not recipe.startswith(SHIPPED) and not Path(recipe).is_file():
        raise typer.BadParameter(f"there is no file {recipe}", param_hint="RECIPE")
    search = ", and what would fit (--no-fits leaves that out)" if fits else ""
    typer.echo(f"estimating what each card holds{search} ...", err=True)
    options = {"cards": cards, "memory": memory, "images": images, "fits": fits}
    done = collect(
        "llamafactory_ascend.host.estimate", [json.dumps(options), recipe, *(overrides or [])], TIMEOUT
    )
    last = done.stages[-1] if done.stages else {}
    if last.get("state") != "done":
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        said = cause(last["error"], done.stderr) if "error" in last else lines[-1]
        typer.echo(
            json.dumps({"error": said}) if as_json else f"it cannot be estimated: {said}", err=not as_json
        )
        raise typer.Exit(2)
    found = last["value"]
    typer.echo(json.dumps(found, indent=2)) if as_json else show(found)
    raise typer.Exit(0 if found["fits"] else 1)


def gib(size: float) -> str:
    """Return bytes in GiB, or in MiB where they are few."""
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 1 << 27 else f"{size / 2**20:.1f} MiB"


def show(found: Mapping[str, Any]) -> None:
    """Print an estimate on stdout."""
    model, batch, card, peak = (found[key] for key in ("model", "batch", "card", "peak"))
    shared = f", {found['sharding']}" if found["cards"] > 1 else ""
    typer.echo(
        f"{model['trainable']:,} of {model['parameters']:,} parameters are trained on {found['cards']} "
        f"card{'s' if found['cards'] > 1 else ''}{shared}"
    )
    pictures = f", {batch['images']} pictures in each" if batch["images"] else ""
    typer.echo(f"micro-batch: {batch['rows']} rows of {batch['cutoff_len']} tokens{pictures}")
    for subject, choice in found["decisions"].items():
        typer.echo(f"{subject}: {choice}")
    kinds = list(dict.fromkeys(kind for held in found["phases"].values() for kind in held))
    table = Table(title="on each card, at the peak of each phase", box=None)
    table.add_column("")
    for phase in found["phases"]:
        table.add_column(phase, justify="right")
    for kind in kinds:
        table.add_row(kind, *(gib(held[kind]) if kind in held else "" for held in found["phases"].values()))
    table.add_row("together", *(gib(sum(held.values())) for held in found["phases"].values()), style="bold")
    Console(width=140, highlight=False).print(table)
    verdict = "fits" if found["fits"] else "does not fit"
    typer.echo(
        f"peak: {gib(peak['bytes'])} in {peak['phase']}; {verdict} on {card['name']} with "
        f"{gib(card['memory'])} ({peak['bytes'] / card['memory']:.0%})"
    )
    if would := found["would_fit"]:
        cards = would["cards"] or "no number"
        typer.echo(
            f"would fit, one at a time: cutoff_len {would['cutoff_len']}, per_device_train_batch_size "
            f"{would['per_device_train_batch_size']}, {cards} of cards at least"
        )
