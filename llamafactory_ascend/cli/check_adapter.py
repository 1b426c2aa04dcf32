"""``llamafactory-ascend check adapter``: is what a run left on disk whole?"""

import json
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """
Examples:

  llamafactory-ascend check adapter saves/qwen

  llamafactory-ascend check adapter saves/qwen/checkpoint-100 --json

Exit codes: 0 whole, 1 problems, 2 no such folder.
"""


def adapter(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", exists=True, file_okay=False, help="Holds adapter_model.safetensors."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON on stdout.")] = False,
) -> None:
    """Check a saved LoRA or OFT adapter: every tensor there, of the right shape, finite, and trained.

    Files alone are read; the base model is not loaded.
    """
    from llamafactory_ascend.checks.adapter import check

    verdict = check(folder)
    if as_json:
        typer.echo(json.dumps(verdict.as_dict(), ensure_ascii=False, indent=2))
    else:
        for problem in verdict.problems:
            typer.echo(f"error {problem}")
        for warning in verdict.warnings:
            typer.echo(f"warning {warning}")
        typer.echo(f"{verdict.tensors} tensors, {verdict.bytes:,} bytes, sha256 {verdict.sha256 or '-'}")
        if verdict.orthogonality_error is not None:
            typer.echo(f"rotations with ||RR'-I||/||I|| up to {verdict.orthogonality_error:.2g}")
        typer.echo("whole" if verdict.ok else "not usable: see the errors above")
    raise typer.Exit(0 if verdict.ok else 1)
