"""From the first argument to the last exit: when the report is opened, kept up to date and closed."""

import atexit
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamafactory_ascend import device, log
from llamafactory_ascend.report import document, failure, files, gathering
from llamafactory_ascend.run import Run

FULL_WRITE_SECONDS = 10.0  # while steps go by the whole report is written this often at most
RETRY_SECONDS = 60.0  # after it could not be written


class Report:
    """The report of the run in this process. Rank 0 writes; failures and ends are written by their own ranks.

    Attributes:
        trained: nothing is left to train.
        closed: this rank has said its last word.
    """

    def __init__(self, run: Run, folder: Path, key: str, versions: dict[str, str]) -> None:
        self.run, self.folder = run, folder
        arguments = run.arguments
        self.device = device.decide(arguments.training.device.type if arguments else None)
        self.state: Any = None  # the Trainer's own, once it trains
        self.trained = arguments is not None and not arguments.training.do_train
        self.closed = False
        self.table_due = False
        self.process = os.getpid()
        self.data = document.opening(run, key, versions, asdict(self.device))
        # Loaded now: rich runs code from strings when it is imported, and after a Ctrl-C any such code makes
        # Python forget that it must exit with 130 (-SIGINT), as the host does, and not with 1.
        from llamafactory_ascend.report.table import show

        if "ray" in sys.modules:  # the host imports it where it can; its atexit handler imports this too late
            with contextlib.suppress(ImportError):
                importlib.import_module("ray.dag.compiled_dag_node")
        self._print = show
        self._inherited = len(run.findings)  # of the process, from loading the plugins
        self._seen = False  # our report has been in the folder
        self._inode = 0
        self._due = 0.0  # when the whole report may be written again
        self._sound = True  # the last write went well
        self._warned: set[str] = set()

    @property
    def step(self) -> int:
        """The last complete optimizer step, also where a callback has failed before ours was told of it."""
        return self.state.global_step if self.state is not None else 0

    def write(self, **changes: Any) -> None:
        """Merge changes into the file, on rank 0; what is impossible is said once and the run goes on."""
        if log.rank() != 0:
            return
        self.data |= {**document.changing(self.run), **changes}
        self._update(lambda report: report)

    def beat(self) -> None:
        """Note the step, on rank 0: by a write of a few bytes, or of everything if that is due."""
        if log.rank() != 0:
            return
        if time.monotonic() > self._due:
            self.write()
        elif self._sound:
            try:
                moved = files.beat(self.folder, self.step, self._inode)
            except Exception as error:
                self._cannot_write(error)
            else:
                if not moved:  # another rank has written its failure
                    self.write()

    def fail(self, error: BaseException) -> None:
        """Record what ended the run on this rank; the first call counts, none after the run has finished."""
        if self.closed or os.getpid() != self.process:
            return
        self.closed = True
        # torchrun may kill this rank while its traceback is printed; our launcher outlives it and prints then
        self.table_due = not (self.data["world_size"] > 1 and document.RUN_ID in os.environ)
        found = failure.describe(error, log.rank(), self.step, self.device.type)
        self.data |= document.changing(self.run)
        self._update(lambda report: {**self._end(report), "failures": [*report["failures"], found]})
        if found["out_of_memory"]:
            log.warn(failure.out_of_memory_line(found), every_rank=True)

    def finish(self) -> None:
        """The run has done all that was asked of it on this rank."""
        if self.closed or os.getpid() != self.process:
            return
        self.closed = self.table_due = True
        self.data |= document.changing(self.run)
        self._update(self._end)
        self.show()

    def close(self) -> None:
        """The process ends, or turns to another run."""
        if os.getpid() != self.process:
            return
        if self.trained:
            self.finish()  # nobody has told us how the run ended, but nothing has failed
        self.show()

    def forget(self) -> None:
        """Take what this run found out of the process's state, so that the next one starts without it."""
        del self.run.findings[self._inherited :]
        self.run.decisions.clear()
        self.run.facts.clear()

    def show(self) -> None:
        """Print the table, once, on rank 0."""
        if self.table_due and log.rank() == 0:
            self.table_due = False
            self._print(files.read(self.folder / files.NAME), self.folder / files.NAME)

    def gather(self) -> None:
        """Collect the facts of all ranks and write them. Every rank must call this at the same point."""
        ranks = gathering.all_gather(gathering.facts(self.run, log.rank()))
        differences = gathering.patch_differences(ranks)
        for difference in differences:
            if difference["harmful"]:
                states = "; ".join(
                    f"{state} on rank {names}" for state, names in difference["states"].items()
                )
                self.run.find("warning", "patches", f"{difference['id']} differs between ranks: {states}")
        if log.rank() == 0:
            for finding in gathering.foreign_findings(ranks):
                self.run.find(finding.level, finding.subject, finding.message)
        merged = {"patches", "findings"}
        kept = [{key: value for key, value in rank.items() if key not in merged} for rank in ranks]
        self.write(ranks=kept, patch_differences=differences)

    def _end(self, report: dict[str, Any]) -> dict[str, Any]:
        finished = document.now() if log.rank() == 0 else report["finished"]
        return {**report, "ended_ranks": sorted({*report["ended_ranks"], log.rank()}), "finished": finished}

    def _update(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        def merge(found: dict[str, Any]) -> dict[str, Any] | None:
            if found and found.get("run") != self.data["run"]:
                if self._seen:
                    raise FileExistsError(
                        f"another run has started in {self.folder}, the report there is its own"
                    )
                files.set_aside(self.folder)
                found = {}
            if not found:
                report = self.data
            elif log.rank() == 0:  # ours, but for what other processes have added
                kept = ("failures", "ended_ranks", "launcher", "finished")
                report = {**self.data, **{key: found[key] for key in kept}}
            else:
                report = found
            report = change({**report, "last_step": max(self.step, found.get("last_step", 0))})
            return document.judged(report)

        try:
            self._inode = files.update(self.folder, merge)
            self._seen = self._sound = True
            self._due = time.monotonic() + FULL_WRITE_SECONDS
        except Exception as error:  # a report is no reason to lose a run
            self._cannot_write(error)

    def _cannot_write(self, error: Exception) -> None:
        self._sound = False
        self._due = time.monotonic() + RETRY_SECONDS
        if type(error).__name__ not in self._warned:
            self._warned.add(type(error).__name__)
            log.warn(
                f"the run report {self.folder / files.NAME} cannot be written, training goes on: "
                f"{type(error).__name__}: {error}",
                every_rank=True,
            )


_open: list[Report] = []  # the report of this process; a list, because a second run replaces the first
_count = [0]  # runs that this process has begun


def begin(run: Run, versions: dict[str, str]) -> None:
    """Open the report of a training run, and learn of whatever ends the process."""
    assert run.arguments is not None
    leave()
    _count[0] += 1
    names = [document.run_name(os.environ)]
    if document.spans_nodes(os.environ):  # each node has a launcher with an id of its own
        names = gathering.all_gather(names[0])
    key = document.run_key(names, os.environ, _count[0])
    report = Report(run, Path(run.arguments.training.output_dir), key, versions)
    report.write()
    if _count[0] == 1:
        _listen()
    _open[:] = [report]


def _listen() -> None:
    """Hear of exceptions that nobody catches and of the end of the process; once per process."""
    atexit.register(leave)
    previous = sys.excepthook

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        failed(error)
        previous(kind, error, trace)

    sys.excepthook = excepthook


def leave() -> None:
    """Close the report of this process, if there is one; what it knew does not pass to the next run."""
    if _open:
        report = _open.pop()
        report.close()
        report.forget()


def failed(error: BaseException) -> None:
    """Record the exception that ends a run, if there is one to record it for."""
    if _open:
        _open[0].fail(error)


def finished() -> None:
    """The run has done all that was asked of it."""
    if _open:
        _open[0].finish()


def current() -> Report | None:
    """Return the report of this process, None outside a training run."""
    return _open[0] if _open else None


def saved() -> None:
    """The last model of a training is on disk: collect what every rank knows."""
    if _open:
        _open[0].gather()
