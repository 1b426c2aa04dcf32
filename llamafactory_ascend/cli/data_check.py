"""``llamafactory-ascend data check``: what a training would make of a data set, before there is one."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from llamafactory_ascend.cli import failures
from llamafactory_ascend.errors import AscendError

if TYPE_CHECKING:
    from llamafactory_ascend.checks.data.catalogue import Catalogue, Entry
    from llamafactory_ascend.checks.data.check import Request, SetCheck
    from llamafactory_ascend.checks.data.problem import Problem
    from llamafactory_ascend.host.data import Encoder

EPILOG = """
Examples:

  llamafactory-ascend data check my_set --dataset-dir data

  llamafactory-ascend data check my_set --eval my_eval --dataset-dir data --json

  llamafactory-ascend data check my_set --model Qwen/Qwen3-8B --template qwen3 --cutoff-len 4096

  llamafactory-ascend data check corpus --stage pt --model Qwen/Qwen3-8B

Exit codes: 0 nothing to say, 1 warnings, 2 errors or wrong usage.
"""


class Stage(StrEnum):
    """The host's stages of training."""

    PT = "pt"
    SFT = "sft"
    RM = "rm"
    DPO = "dpo"
    KTO = "kto"
    PPO = "ppo"


def check(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="As a recipe names them in `dataset`.")
    ],
    dataset_dir: Annotated[Path, typer.Option(help="Holds dataset_info.json.")] = Path("data"),
    evaluation: Annotated[
        list[str] | None, typer.Option("--eval", metavar="NAME", help="An `eval_dataset`; may be repeated.")
    ] = None,
    dataset_info: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="As `ascend.dataset_info`; may be repeated.")
    ] = None,
    stage: Annotated[Stage, typer.Option(help="Of the training.")] = Stage.SFT,
    media_dir: Annotated[
        Path | None, typer.Option(help="As in the recipe; the folder of the data by default.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Its tokenizer counts tokens; without it none are.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="As in the recipe; needed with --model, but for pt.")
    ] = None,
    cutoff_len: Annotated[int, typer.Option(min=1, help="As in the recipe.")] = 2048,
    max_samples: Annotated[
        int | None, typer.Option(min=1, help="As in the recipe: the rows that are used.")
    ] = None,
    mask_history: Annotated[bool, typer.Option("--mask-history", help="As in the recipe.")] = False,
    dropped: Annotated[float, typer.Option(min=0, max=1, help="As `ascend.data.dropped`.")] = 0.1,
    empty: Annotated[float, typer.Option(min=0, max=1, help="As `ascend.data.empty`.")] = 0.1,
    leaked: Annotated[float, typer.Option(min=0, max=1, help="As `ascend.data.leaked`.")] = 1.0,
    lost: Annotated[float, typer.Option(min=0, max=1, help="As `ascend.data.lost`.")] = 1.0,
    examples: Annotated[int, typer.Option(min=1, help="Rows that a finding names.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON on stdout.")] = False,
) -> None:
    """Check data sets from their entries in dataset_info.json to their last rows; rows count from 0.

    A training does the same before its model is loaded, but for the tokens, and for a limited time.
    """
    from llamafactory_ascend.checks.data.check import Request
    from llamafactory_ascend.checks.data.problem import Limits, Problem
    from llamafactory_ascend.features import data_checks

    if model and not template and stage != "pt":
        raise typer.BadParameter("--model needs --template: both decide what is counted")
    limits = Limits(dropped, empty, leaked, lost, examples)
    try:
        found = data_checks.catalogue(dataset_dir, dataset_info or [])
        encoder = _encoder(model, template, cutoff_len, mask_history, media_dir or dataset_dir)
    except AscendError as error:
        _finish([], [Problem("error", "dataset_info", error.what, error.hint)], as_json)
    request = Request(stage, cutoff_len, media_dir, limits, max_samples=max_samples)
    general = [Problem("warning", "dataset_info", warning) for warning in found.warnings]
    sets, leaks = examine(found, names, evaluation or [], request, encoder, as_json)
    _finish(sets, [*general, *leaks], as_json)


def examine(
    found: "Catalogue",
    names: list[str],
    evaluation: list[str],
    request: "Request",
    encoder: "Encoder | None",
    quiet: bool,
) -> "tuple[list[SetCheck], list[Problem]]":
    """Check every data set, evaluation sets first; a name that cannot be is a verdict like any other."""
    from llamafactory_ascend.checks.data.check import check as check_set
    from llamafactory_ascend.checks.data.leaks import Leaks
    from llamafactory_ascend.cli.data_progress import Progress

    leaks = Leaks(request.limits) if evaluation else None
    verdicts = []
    with Progress(quiet) as progress:
        for name, evaluates in [(name, True) for name in evaluation] + [(name, False) for name in names]:
            try:
                entry = found.find(name)
            except AscendError as error:
                verdicts.append(_unfound(name, error))
                continue
            progress.begin(name, _size(entry))
            wanted = _counting(request, entry, encoder)
            verdicts.append(check_set(entry, wanted, leaks, evaluates, watch=progress.advance))
    return verdicts, leaks.problems() if leaks else []


def _unfound(name: str, error: AscendError) -> "SetCheck":
    from llamafactory_ascend.checks.data.check import SetCheck
    from llamafactory_ascend.checks.data.problem import Problem

    return SetCheck(name, "", "", 0, 0, 0, False, 0.0, (Problem("error", "name", error.what, error.hint),))


def _size(entry: "Entry") -> int:
    from llamafactory_ascend.checks.data import tables

    return tables.size(tables.files_of(entry.path)) if entry.path else 0


def _encoder(
    model: str | None, template: str | None, cutoff_len: int, mask_history: bool, media_dir: Path
) -> "Encoder | None":
    if model is None:
        return None
    from llamafactory_ascend.host import data

    try:
        return data.load_encoder(model, template, cutoff_len, mask_history, media_dir)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise AscendError(
            f"--model {model} with --template {template}: {cause}",
            "name a folder that holds the tokenizer, or leave --model out: tokens are then not counted",
        ) from None


def _counting(request: "Request", entry: "Entry", encoder: "Encoder | None") -> "Request":
    """Return the request with a function that counts the tokens of the entry's rows."""
    if encoder is None:
        return request
    from dataclasses import replace

    from llamafactory_ascend.host.data import TokenCounter

    return replace(request, count=TokenCounter(entry, encoder, request.stage))


def _finish(sets: "list[SetCheck]", general: "list[Problem]", as_json: bool) -> NoReturn:
    from llamafactory_ascend.checks.data.check import exit_code

    code = exit_code([*general, *(problem for one in sets for problem in one.problems)])
    with failures.told():
        _print(sets, general, code, as_json)
    raise typer.Exit(code)


def _print(sets: "list[SetCheck]", general: "list[Problem]", code: int, as_json: bool) -> None:
    if as_json:
        verdict = {
            "exit_code": code,
            "sets": [one.as_dict() for one in sets],
            "problems": [problem.as_dict() for problem in general],
        }
        typer.echo(json.dumps(verdict, ensure_ascii=False, indent=2))
    else:
        show(sets, general)


def show(sets: "list[SetCheck]", general: "list[Problem]") -> None:
    """Print the verdicts on stdout, each data set's own findings under its line."""
    for one in sets:
        rows = f"{one.rows:,} rows, {one.kept:,} kept" if one.rows else "no rows read"
        partly = f", {one.unused:,} more behind max_samples" if one.unused else ""
        partly += "" if one.complete else ", not all of them read" if one.rows else ""
        typer.echo(f"{one.name}: {rows}{partly}, {one.seconds:.1f} s{f' ({one.place})' if one.place else ''}")
        for problem in one.problems:
            _show_problem(problem, "  ")
        if not one.problems:
            typer.echo("  nothing to say")
    for problem in general:
        _show_problem(problem, "")


def _show_problem(problem: "Problem", indent: str) -> None:
    typer.echo(f"{indent}{problem.level} {problem.message}")
    if problem.next:
        typer.echo(f"{indent}  next: {problem.next}")
