"""``llamafactory-ascend data make``: a shipped data set as a folder that a recipe can name."""

from pathlib import Path
from typing import Annotated

import typer

from llamafactory_ascend.cli import failures

EPILOG = """
Examples:

  llamafactory-ascend data make product_attributes data/product_attributes

  llamafactory-ascend data make vertical_demo data/vertical_demo

  llamafactory-ascend data make product_attributes data/other_products --seed 7

Exit codes: 0 made, 2 nothing was written: no such data set, or something is there already.
"""


def make(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="product_attributes, vertical_demo, ascend_qa...")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to; parents are made, nothing is replaced.")
    ],
    seed: Annotated[int, typer.Option(help="Of the pictures and questions of product_attributes.")] = 0,
) -> None:
    """Make a dataset_dir with dataset_info.json, data files and pictures, out of what is shipped.

    Stock LLaMA-Factory reads it as it is: image paths are relative to it, which is where the host looks.
    """
    from llamafactory_ascend import demo_data

    with failures.told(folder):
        made = demo_data.make(name, folder, seed)
    for entry, rows in made.rows.items():
        typer.echo(f"{entry}: {rows} rows")
    if made.pictures:
        typer.echo(f"{made.pictures} pictures of products, drawn from seed {seed}")
    typer.echo(f"in a recipe: dataset: {name}, dataset_dir: {made.folder}")
