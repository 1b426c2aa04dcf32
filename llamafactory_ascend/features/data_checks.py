"""Data sets before a run: its names looked up, and their rows for a while, before the model is loaded."""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamafactory_ascend import resources
from llamafactory_ascend.checks.data import catalogue as catalogues
from llamafactory_ascend.checks.data.catalogue import INFO, Catalogue, Entry
from llamafactory_ascend.checks.data.check import Request, SetCheck, check
from llamafactory_ascend.checks.data.leaks import Leaks
from llamafactory_ascend.checks.data.problem import Limits, Problem
from llamafactory_ascend.features.evaluation import judge_early
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from llamafactory_ascend.run import Arguments, Run
    from llamafactory_ascend.settings import Data

TRAINS_ANYWAY = ("media_type",)  # errors that the host makes something of


@hookimpl
def ascend_dataset_info() -> list[Path]:
    return [_shipped()]


def _shipped() -> Path:
    return Path(str(resources.folder("dataset_info"))) / INFO


def catalogue(dataset_dir: Path, files: Iterable[str | Path] = ()) -> Catalogue:
    """Return every data set that can be named: of `dataset_dir`, of `files`, of plugins, and shipped.

    Raises:
        AscendError: the user's dataset_info.json, or one of `files`, cannot be read.
    """
    from llamafactory_ascend import plugins

    found = [file for given in plugins.manager().hook.ascend_dataset_info() for file in given]
    shipped = _shipped()
    others = [file for file in found if file != shipped]
    return catalogues.read(
        catalogues.sources(dataset_dir, [Path(file).expanduser() for file in files], others, shipped)
    )


def is_folder(dataset_dir: Any) -> bool:
    """True where names are looked up in a folder, and not in a hub or in a dict that a program passes."""
    return isinstance(dataset_dir, str) and dataset_dir != "ONLINE" and not dataset_dir.startswith("REMOTE:")


def limits(data: "Data") -> Limits:
    return Limits(data.dropped, data.empty, data.leaked, data.lost)


@hookimpl
def ascend_preflight(run: "Run", arguments: "Arguments") -> list[Finding]:
    """Look up every data set of the run, and on one rank of each node look at their rows for a while."""
    data = arguments.data
    names = [*(data.dataset or []), *(data.eval_dataset or [])]
    if not names:
        return []
    if not is_folder(data.dataset_dir):
        run.decide(
            "data", "not checked", f"dataset_dir {data.dataset_dir}: the rows are on a hub or in a cloud"
        )
        return []
    if data.tokenized_path and os.path.isdir(data.tokenized_path) and os.listdir(data.tokenized_path):  # noqa: PTH112, PTH208
        run.decide(
            "data", "not checked", f"{data.tokenized_path} holds tokenized data, the rows are not read"
        )
        return []
    found = catalogue(Path(data.dataset_dir), run.settings.dataset_info)
    findings = [Finding("warning", "dataset_info", warning) for warning in found.warnings]
    entries = {name: found.find(name) for name in names}
    for name, entry in entries.items():
        if entry.source.origin != "yours":
            run.decide(f"data.{name}", str(entry.path or "hub"), f"a fragment: {entry.place}")
    if run.settings.data.seconds <= 0 or os.environ.get("LOCAL_RANK", "0") != "0":
        return findings
    verdicts, leaks = _look(run, arguments, entries)
    for verdict in verdicts:
        findings += [_finding(verdict.name, problem) for problem in verdict.problems]
        if not verdict.path:
            run.decide(f"data.{verdict.name}.checked", "not checked", "its rows are in no local file")
            continue
        how = "all rows" if verdict.complete else "what could be read before the time bound"
        how += f", {verdict.unused} more behind `max_samples`" if verdict.unused else ""
        reason = f"{how}, {verdict.seconds:.1f} s of at most {run.settings.data.seconds:g} s for all sets"
        run.decide(f"data.{verdict.name}.checked", f"{verdict.rows} rows", reason)
    counted = {
        verdict.name: _drawn(entries[verdict.name]) or verdict.rows
        for verdict in verdicts
        if verdict.complete
    }
    findings += judge_early(arguments, counted)
    return findings + [Finding(problem.level, "eval_dataset", problem.sentence()) for problem in leaks]


def _drawn(entry: Entry) -> int:
    """Return `num_samples`, as many rows as are drawn from a set; 0 where it has none."""
    drawn = entry.keys.get("num_samples") if isinstance(entry.keys, Mapping) else None
    return drawn if isinstance(drawn, int) else 0


def _look(
    run: "Run", arguments: "Arguments", entries: dict[str, Entry]
) -> tuple[list[SetCheck], list[Problem]]:
    """Check evaluation sets, then training sets, all until one deadline."""
    data, training = arguments.data, arguments.training
    deadline = time.monotonic() + run.settings.data.seconds
    allowed = limits(run.settings.data)
    leaks = Leaks(allowed) if data.dataset and data.eval_dataset else None
    verdicts = []
    sets = [(name, True) for name in data.eval_dataset or []] + [(name, False) for name in data.dataset or []]
    for name, evaluation in sets:
        entry = entries[name]
        request = Request(
            stage="ppo" if evaluation and training.predict_with_generate else arguments.finetuning.stage,
            cutoff_len=data.cutoff_len,
            media_dir=Path(data.media_dir),
            limits=allowed,
            packing=data.packing is not False,
            batch=data.preprocessing_batch_size,
            max_samples=data.max_samples,
        )
        verdicts.append(check(entry, request, leaks, evaluation, deadline))
    return verdicts, leaks.problems() if leaks else []


def _finding(name: str, problem: Problem) -> Finding:
    level = "warning" if problem.kind in TRAINS_ANYWAY else problem.level
    return Finding(level, f"data set `{name}`", problem.sentence())
