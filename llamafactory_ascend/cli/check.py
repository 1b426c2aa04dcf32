"""``llamafactory-ascend check``: would a recipe start, is a run done, an adapter whole, a kernel right?"""

from typing import Any

import typer
from typer.core import TyperGroup

from llamafactory_ascend.cli import check_adapter, check_kernels, check_recipe, check_run

EPILOG = """
Examples:

  llamafactory-ascend check train.yaml

  llamafactory-ascend check run saves/qwen

  llamafactory-ascend check adapter saves/qwen

  llamafactory-ascend check kernels

Exit codes: 0 fine, 1 findings, 2 refused or wrong usage; each command's --help says what they mean there.
"""

HELP = "Say whether a recipe would start, a run is done, an adapter whole, or this machine's kernels right."


class Checks(TyperGroup):
    """A recipe may be named without the word `recipe`: `check train.yaml`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        named = args[0].startswith(check_recipe.SHIPPED) or args[0].endswith((".yaml", ".yml", ".json"))
        words = ["recipe", *args] if named else args
        return super().resolve_command(ctx, words)


app = typer.Typer(cls=Checks, help=HELP, no_args_is_help=True, epilog=EPILOG)
# `--ascend.strict true` behind a recipe is no option of this command, but one of the training.
behind = {"ignore_unknown_options": True}
app.command("recipe", epilog=check_recipe.EPILOG, context_settings=behind)(check_recipe.recipe)
app.command("run", epilog=check_run.EPILOG)(check_run.run)
app.command("adapter", epilog=check_adapter.EPILOG)(check_adapter.adapter)
app.command("kernels", epilog=check_kernels.EPILOG)(check_kernels.kernels)
