"""``llamafactory-ascend data stats``: how long the rows of a training are, and what `cutoff_len` leaves."""

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamafactory_ascend.cli import data_files, data_histogram, data_workers, failures
from llamafactory_ascend.errors import AscendError

if TYPE_CHECKING:
    from llamafactory_ascend.checks.data.catalogue import Entry
    from llamafactory_ascend.checks.lengths.totals import Totals
    from llamafactory_ascend.cli.data_progress import Progress
    from llamafactory_ascend.host.data import Encoder
    from llamafactory_ascend.host.lengths import Item

EPILOG = """
Examples:

  llamafactory-ascend data stats train.yaml

  llamafactory-ascend data stats train.yaml cutoff_len=8192 --ranks 8 --plot lengths.png

  llamafactory-ascend data stats my_set --model Qwen/Qwen3-8B --template qwen3 --cutoff-len 4096

  llamafactory-ascend data stats corpus --model Qwen/Qwen3-8B --stage pt --json | jq .blocks

Exit codes: 0 counted, 1 counted, but rows are left out or cannot be encoded, 2 not counted: wrong usage, or a
file that cannot be read, 130 interrupted: nothing was written.
"""
STAGES = ("pt", "sft", "rm", "kto")
INTERRUPTED = 130


@dataclass(frozen=True)
class Job:
    """What is counted: the recipe's data sets, encoded in batches as its training would."""

    recipe: dict[str, Any]
    stage: str
    entries: "list[Entry]"
    encoder: "Encoder"


def stats(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]... | NAME...",
            help="A recipe with overrides as llamafactory-cli train takes them, or data sets by their names.",
        ),
    ],
    model: Annotated[str | None, typer.Option(help="With NAME: its tokenizer and processor count.")] = None,
    template: Annotated[str | None, typer.Option(help="With NAME: as in a recipe.")] = None,
    cutoff_len: Annotated[int | None, typer.Option(min=1, help="With NAME: as in a recipe; 2048.")] = None,
    stage: Annotated[str | None, typer.Option(help=f"With NAME: {', '.join(STAGES)}; sft.")] = None,
    dataset_dir: Annotated[
        Path | None, typer.Option(help="With NAME: holds dataset_info.json; data.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Of the training; NPROC_PER_NODE x NNODES, else 1.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that count; the processors.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the histogram as PNG.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout.")] = False,
) -> None:
    """Count the tokens of every row as the host's preprocessing would: what is cut, packed, trained on.

    Rows stream through: memory does not grow with their number. Evaluation sets are not counted.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with failures.told(plot):
            if plot is not None:
                data_files.check_target(plot, force)
            options = {
                "model_name_or_path": model,
                "template": template,
                "cutoff_len": cutoff_len,
                "stage": stage,
                "dataset_dir": None if dataset_dir is None else str(dataset_dir),
            }
            job = prepare(what, {key: value for key, value in options.items() if value is not None})
            started = time.monotonic()
            totals = count(job, workers or data_workers.cores(), as_json)
            figures = summarize(job, totals, ranks or _ranks(), time.monotonic() - started)
            show(figures, totals, as_json)  # before the picture, which a full disk may prevent
            if plot is not None:
                title = f"{', '.join(entry.name for entry in job.entries)}: {totals.kept:,} rows"
                data_histogram.plot(totals.tokens, figures["cutoff_len"], title, plot)
                typer.echo(f"drawn: {plot}", err=True)
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    raise typer.Exit(1 if totals.dropped or totals.failed else 0)


def show(figures: dict[str, Any], totals: "Totals", as_json: bool) -> None:
    """Print the figures on stdout."""
    if as_json:
        typer.echo(json.dumps(figures, ensure_ascii=False, indent=2))
    else:
        typer.echo("\n".join(lines(figures, totals)))


def prepare(what: list[str], options: dict[str, Any]) -> Job:
    """Read the recipe, or make one of names and options, and load what encodes its rows.

    Raises:
        AscendError: a key, a name or a file that cannot be.
    """
    from llamafactory_ascend.checks.data import schema
    from llamafactory_ascend.checks.lengths import steps
    from llamafactory_ascend.features import data_checks
    from llamafactory_ascend.host import arguments, lengths

    settings: Any = None
    if arguments.names_recipe(what):
        if options:
            keys = ", ".join(options)
            raise AscendError(f"a recipe has its own {keys}", "write KEY=VALUE behind the recipe")
        recipe, settings = _read_recipe(what)
    else:
        if "model_name_or_path" not in options:
            raise AscendError("data sets by name need a tokenizer to count with", "--model MODEL")
        recipe = {"dataset_dir": "data", **options, "dataset": ",".join(what)}
    stage = recipe.get("stage", "sft")
    stage = "rm" if stage == "dpo" else stage
    if stage not in STAGES:
        raise AscendError(f"stage `{stage}` is not counted", f"one of {', '.join(STAGES)}")
    if not recipe.get("dataset"):
        raise AscendError("the recipe names no `dataset`")
    if not data_checks.is_folder(recipe.setdefault("dataset_dir", "data")):
        raise AscendError(f"dataset_dir {recipe['dataset_dir']} is no folder: its rows are elsewhere")
    encoder = lengths.load(recipe, stage)
    steps.steps(0, recipe, 1)  # a batch of 0 is found now, not after all rows
    found = data_checks.catalogue(Path(recipe["dataset_dir"]), settings.dataset_info if settings else [])
    entries = [found.find(name) for name in encoder.data_args.dataset]
    for entry in entries:
        errors = [one for one in schema.problems(entry.name, entry.keys, stage) if one.level == "error"]
        if errors:
            raise AscendError(f"{entry.place}: {errors[0].message}", _check_hint(entry.name, recipe))
    return Job(recipe, stage, entries, encoder)


def _read_recipe(words: list[str]) -> tuple[dict[str, Any], Any]:
    """Return the host's keys of a recipe with its overrides, and our settings."""
    import yaml
    from omegaconf.errors import OmegaConfBaseException

    from llamafactory_ascend import settings
    from llamafactory_ascend.host import arguments

    resolved = arguments.resolve(words)
    try:
        rest, block = settings.take(arguments.read_recipe(resolved))
    except (OSError, ValueError, TypeError, yaml.YAMLError, OmegaConfBaseException) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise AscendError(f"{words[0]} cannot be read: {' '.join(cause.split())}") from None
    return rest, settings.read(block, resolved[0], words[1:])


def _check_hint(name: str, recipe: dict[str, Any]) -> str:
    return f"llamafactory-ascend data check {name} --dataset-dir {recipe['dataset_dir']}"


def count(job: Job, workers: int, quiet: bool) -> "Totals":
    """Go through all rows in batches as large as the host's.

    Raises:
        AscendError: a file cannot be read to its end.
    """
    from llamafactory_ascend.checks.lengths.totals import Totals
    from llamafactory_ascend.cli.data_progress import Progress
    from llamafactory_ascend.host.lengths import BatchCounter

    counter = BatchCounter(job.entries, job.encoder, job.stage)
    totals = Totals()
    with Progress(quiet) as progress:
        rows = _rows(job, progress)
        batches = itertools.takewhile(bool, (_batch(rows, job) for _ in itertools.count()))
        results = data_workers.spread(counter, batches, workers)
        with contextlib.closing(results):
            for one in results:
                totals.merge(one)
    if not totals.rows:
        raise AscendError(f"{job.entries[0].path} holds no rows")
    return totals


def _batch(rows: "Iterator[Item]", job: Job) -> "list[Item]":
    return list(itertools.islice(rows, job.encoder.data_args.preprocessing_batch_size))


def _rows(job: Job, progress: "Progress") -> "Iterator[Item]":
    from llamafactory_ascend.checks.data import tables
    from llamafactory_ascend.checks.data.check import path_problems
    from llamafactory_ascend.checks.data.json_rows import Row

    for of, entry in enumerate(job.entries):
        hint = _check_hint(entry.name, job.recipe)
        if entry.path is None:
            raise AscendError(
                f"{entry.place}: the rows of `{entry.name}` are in no local file and not counted"
            )
        problems = [one for one in path_problems(entry) if one.level == "error"]
        if problems:
            raise AscendError(problems[0].message, problems[0].next)
        files = tables.files_of(entry.path)
        problems = tables.type_problems(files)
        if problems:
            raise AscendError(problems[0].message, problems[0].next)
        progress.begin(entry.name, tables.size(files))
        found = tables.read(files, progress.advance)
        for item in itertools.islice(found, job.encoder.data_args.max_samples):
            if not isinstance(item, Row):
                raise AscendError(item.message, item.next or hint)
            if not isinstance(item.value, dict):
                raise AscendError(f"{entry.path} row {item.number} is no object", hint)
            yield of, item.number, item.value


def _ranks() -> int:
    numbers = (os.environ.get(name, "") for name in ("NPROC_PER_NODE", "NNODES"))
    sizes = [int(number) for number in numbers if number.isdigit() and int(number)]
    return sizes[0] * sizes[1] if len(sizes) == 2 else sizes[0] if sizes else 1


def summarize(job: Job, totals: "Totals", ranks: int, seconds: float) -> dict[str, Any]:
    """Return all figures as plain data."""
    from llamafactory_ascend.checks.lengths import steps

    args = job.encoder.data_args
    packs = bool(args.packing) and job.stage in ("pt", "sft")
    samples = totals.blocks if packs else totals.kept
    if args.val_size:
        samples = steps.left_to_train(samples, args.val_size)
    return {
        "data_sets": [entry.name for entry in job.entries],
        "stage": job.stage,
        "template": args.template,
        "cutoff_len": args.cutoff_len,
        "packing": packs,
        **totals.as_dict(),
        "steps": steps.steps(samples, job.recipe, ranks).as_dict(),
        "notes": list(_notes(job, packs)),
        "seconds": round(seconds, 2),
    }


def _notes(job: Job, packs: bool) -> Iterator[str]:
    """Say where a training's figures can differ from these."""
    from llamafactory_ascend.checks.data import schema

    args = job.encoder.data_args
    if packs and args.cutoff_len + 1 == job.recipe.get("cutoff_len", 2048):
        yield f"with `packing` the host takes one off cutoff_len: {args.cutoff_len} tokens are packed"
    if packs and (args.preprocessing_num_workers or 1) > 1:
        yield (
            f"blocks are those of one process; `preprocessing_num_workers: {args.preprocessing_num_workers}` "
            "divides the rows first, so that more tails are left over"
        )
    if packs and args.val_size:
        yield "`val_size` is taken out of the packed blocks here, the host takes it out of the rows"
    if args.mix_strategy != "concat":
        yield f"`mix_strategy: {args.mix_strategy}` repeats or leaves out rows; here each counts once"
    for entry in job.entries:
        if isinstance(entry.keys, dict) and entry.keys.get("num_samples") is not None:
            yield f"`{entry.name}` has `num_samples`: the host draws that many rows, here all are counted"
    if job.stage in (*schema.PAIRED, "kto"):
        yield "of several answers to a question the longest is counted"


def lines(figures: dict[str, Any], totals: "Totals") -> Iterator[str]:
    """Return the figures as text, the histogram last."""
    cutoff, rows = figures["cutoff_len"], figures["kept"]
    left_out = f", {figures['dropped']:,} left out" if figures["dropped"] else ""
    failed = f", {figures['failed']:,} that cannot be encoded" if figures["failed"] else ""
    yield f"{', '.join(figures['data_sets'])}: {figures['rows']:,} rows{left_out}{failed}"
    for example in figures["examples"]:
        yield f"  {example}"
    if not rows:
        return
    sizes = ", ".join(f"{name} % {size:,}" for name, size in figures["percentiles"].items() if name != "max")
    longest = figures["percentiles"]["max"]
    yield f"tokens of a row: mean {figures['mean']:,}; {sizes}; max {longest:,} ({figures['longest_row']})"
    yield f"tokens: {_kept(figures['tokens'], figures['tokens_kept'])}"
    over = figures["over_cutoff"]
    yield f"cut by cutoff_len {cutoff:,}: {over:,} rows ({_percent(over, rows)})"
    keeps = ", ".join(
        f"{part.replace('%', ' %')} of the rows {size:,}"
        for part, size in figures["cutoff_len_that_keeps"].items()
    )
    yield f"cutoff_len that keeps whole: {keeps}"
    yield f"trained on: {_kept(figures['supervised']['total'], figures['supervised']['kept'])}"
    yield f"answers with their end: {figures['ends']['kept']:,} of {figures['ends']['total']:,}"
    if len(figures["turns"]) > 1:
        for number, turn in figures["turns"].items():
            yield f"  turn {number}: {turn['rows']:,} answers, {_kept(turn['total'], turn['kept'])}"
    for name, share in figures["media"].items():
        yield f"{name} tokens: {_kept(share['total'], share['kept'])}, in {share['rows']:,} rows"
    if figures["packing"]:
        tail = figures["dropped_tail"]
        amount = f"{tail:,} tokens ({_percent(tail, figures['tokens_kept'])})"
        yield f"packed: {figures['blocks']:,} blocks of {cutoff:,}; left out: {amount}"
    counted = figures["steps"]
    yield (
        f"steps: {counted['per_epoch']:,} per epoch, {counted['total']:,} in all "
        f"({counted['samples']:,} samples, batch {counted['batch']} x accumulation {counted['accumulation']} "
        f"x {counted['ranks']} rank{'s' if counted['ranks'] > 1 else ''})"
    )
    for note in figures["notes"]:
        yield f"note: {note}"
    yield ""
    yield from data_histogram.draw_text(totals.tokens, cutoff)


def _kept(total: int, kept: int) -> str:
    return f"{total:,}, kept {kept:,}, lost {total - kept:,} ({_percent(total - kept, total)})"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"
