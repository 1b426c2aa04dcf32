"""The command ``llamafactory-ascend``: one file per verb. Training itself needs none of it.

Nothing heavy is imported here: ``doctor`` has to work where ``import torch`` does not.
"""

import typer

from llamafactory_ascend import __version__
from llamafactory_ascend.cli import check, data, doctor, estimate, patches, recipes

__all__ = ["app"]

EPILOG = """
Examples:

  llamafactory-ascend doctor

  llamafactory-ascend check adapter saves/qwen

  llamafactory-ascend estimate train.yaml

Exit codes: 0 fine, 1 findings, 2 broken or wrong usage; each command's --help says what they mean there.
"""

app = typer.Typer(
    name="llamafactory-ascend",
    no_args_is_help=True,
    epilog=EPILOG,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"llamafactory-ascend-plugin {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Look after LLaMA-Factory on Ascend NPUs. Training itself is stock: llamafactory-cli train x.yaml."""


app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.add_typer(check.app, name="check")
app.command("estimate", epilog=estimate.EPILOG, context_settings=check.behind)(estimate.estimate)
app.add_typer(recipes.app, name="recipes")
app.add_typer(data.app, name="data")
app.command("patches", epilog=patches.EPILOG)(patches.patches)
