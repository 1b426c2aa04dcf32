"""``llamafactory-ascend check run``: did a run come to its end, and is what it left whole?"""

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from llamafactory_ascend.checks.finished_run import RunCheck

EPILOG = """
Examples:

  llamafactory-ascend check run saves/qwen

  llamafactory-ascend check run saves/qwen --json | jq -r '.problems[]'

Exit codes: 0 done and whole, 1 not: unfinished, failed or broken, 2 no folder of a run.
"""


def run(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", exists=True, file_okay=False, help="The output_dir of a training."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON on stdout.")] = False,
) -> None:
    """Judge a run that has ended, or died, by what is in its output_dir: with a report or without the plugin.

    Its end, steps, loss and gradients, the saved model, the last checkpoint, a lock that was left behind.
    Nothing is started, nothing is written.
    """
    from llamafactory_ascend.checks import finished_run
    from llamafactory_ascend.launching import lock

    if not os.access(folder, os.X_OK):
        raise typer.BadParameter(f"the files in {folder} may not be read", param_hint="DIR")
    if finished_run.is_checkpoint(folder):
        what = f"{folder} is a checkpoint; the run is {folder.resolve().parent}"
        raise typer.BadParameter(what, param_hint="DIR")
    if not finished_run.is_run(folder):
        raise typer.BadParameter(f"{folder} holds nothing that a run writes", param_hint="DIR")
    verdict = finished_run.check(folder, lock.this_process("", ""), time.time())
    if as_json:
        typer.echo(json.dumps(verdict.as_dict(), indent=2))  # ASCII: a path may be no text in any encoding
    else:
        show(verdict)
    raise typer.Exit(0 if verdict.ok else 1)


def show(verdict: "RunCheck") -> None:
    """Print a verdict on stdout, the conclusion last."""
    for problem in verdict.problems:
        typer.echo(f"error {problem}")
    for warning in verdict.warnings:
        typer.echo(f"warning {warning}")
    code = "" if verdict.exit_code is None else f", exit code {verdict.exit_code}"
    steps = f", step {verdict.step} of {verdict.max_steps or '?'}"
    typer.echo(f"state {verdict.state or 'unknown, there is no report'}{code}{steps}")
    if verdict.sha256:
        typer.echo(f"adapter sha256 {verdict.sha256}")
    if verdict.checkpoint:
        typer.echo(f"last checkpoint {verdict.checkpoint}")
    typer.echo("done and whole" if verdict.ok else "not done, or not whole: see the errors above")
