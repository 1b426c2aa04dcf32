"""``llamafactory-ascend check recipe``: would this training start here, and what should be known before?"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llamafactory_ascend.cli.stages import collect

EPILOG = """
Examples:

  llamafactory-ascend check train.yaml

  llamafactory-ascend check ascend:qwen2_5_7b_lora_sft

  llamafactory-ascend check recipe train.yaml cutoff_len=8192 ascend.strict=true

  NPROC_PER_NODE=8 llamafactory-ascend check train.yaml --json | jq .findings

Exit codes: 0 nothing speaks against it, 1 it would start with warnings, 2 it would be refused.
"""

TIMEOUT = 600  # seconds; a cold import from a network disk takes minutes
MARK = "[llamafactory-ascend] "
SHIPPED = "ascend:"  # stands before the name of a recipe inside the package


def recipe(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A .yaml, .yml or .json file, or ascend:NAME of a shipped one."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="As llamafactory-cli train takes them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON on stdout.")] = False,
) -> None:
    """Judge a recipe as rank 0 of all ranks that would be started, up to the loading of the model.

    Nothing is written, no weights are read; the device is opened, as every training does first.
    """
    if not name.startswith(SHIPPED) and not Path(name).is_file():
        raise typer.BadParameter(f"there is no file {name}", param_hint="RECIPE")
    verdict = examine([name, *(overrides or [])])
    if as_json:
        typer.echo(json.dumps(verdict, indent=2))  # ASCII: a path may be no text in any encoding
    else:
        show(verdict)
    raise typer.Exit(verdict["exit_code"])


def examine(words: list[str]) -> dict[str, Any]:
    """Run the preflight of a recipe in a process of its own.

    Returns:
        ``findings`` (level, subject, message), ``decisions`` (subject, choice, reason) and ``exit_code``.
    """
    found = collect("llamafactory_ascend.host.preflight", words, TIMEOUT)
    return judge(found.stages, found.code, found.stderr)


def judge(stages: Sequence[Mapping[str, Any]], code: int | None, stderr: str) -> dict[str, Any]:
    """Turn the stages of the preflight into a verdict.

    Args:
        code: the exit code of its process, None where it did not end in time.
        stderr: what it said.
    """
    said = next((stage["value"] for stage in stages if stage["stage"] == "said"), None)
    findings = list(said["findings"]) if said else []
    for stage in stages:
        if stage["state"] == "failed":
            findings.append(
                {"level": "error", "subject": "refused", "message": cause(stage["error"], stderr)}
            )
    if said is None:
        lines = stderr.strip().splitlines() or ["it said nothing"]
        how = f"did not end within {TIMEOUT} s" if code is None else f"ended with code {code}"
        message = f"the preflight {how}; last line: {lines[-1]}"
        findings.append({"level": "error", "subject": "preflight", "message": message})
    levels = {finding["level"] for finding in findings}
    return {
        "findings": findings,
        "decisions": said["decisions"] if said else [],
        "exit_code": 2 if "error" in levels else 1 if "warning" in levels else 0,
    }


def cause(error: str, stderr: str) -> str:
    """Return the message of a refusal; one that ended the process printed it instead of raising it."""
    kind, _, message = error.partition(": ")
    if kind == "SystemExit":
        lines = stderr.splitlines() or [error]
        said = [number for number, line in enumerate(lines) if line.startswith(MARK)]
        if not said or ": error: " in lines[-1]:  # of argparse, below its long usage
            return lines[-1]
        return "\n".join(lines[said[-1] :]).removeprefix(MARK)  # with its `next:`; warnings come before it
    return message if kind == "AscendError" else error


SUMMARY = {
    0: "nothing speaks against it, up to the loading of the model",
    1: "it would start, with the warnings above",
    2: "it would be refused",
}


def show(verdict: dict[str, Any]) -> None:
    """Print a verdict on stdout, the worst last, where a reader's eye is."""
    for decision in verdict["decisions"]:
        typer.echo(f"{decision['subject']}: {decision['choice']} ({decision['reason']})")
    order = ("note", "warning", "error")
    for finding in sorted(verdict["findings"], key=lambda finding: order.index(finding["level"])):
        typer.echo(f"{finding['level']} {finding['subject']}: {finding['message']}")
    typer.echo(SUMMARY[verdict["exit_code"]])
