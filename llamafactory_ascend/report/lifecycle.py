"""From the first argument to the last exit: when the report is opened, kept up to date and closed."""

import atexit
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamafactory_ascend import device, log, plugins
from llamafactory_ascend.report import document, failure, files
from llamafactory_ascend.run import Run


class Report:
    """The report of the run in this process; only rank 0 writes, but a failure writes from any rank."""

    def __init__(self, run: Run, folder: Path, versions: dict[str, str]) -> None:
        self.run, self.folder = run, folder
        self.device = device.decide()
        self.step = 0
        self.trained = not run.arguments.training.do_train if run.arguments else True
        self.failure: dict[str, Any] | None = None
        self.data = document.opening(run, versions, asdict(self.device))
        self.broken = False

    def write(self, **changes: Any) -> None:
        """Merge changes into the file. A report that cannot be written is said once and never stops a run."""
        if log.rank() != 0 or self.broken:
            return
        self.data |= {**document.changing(self.run), **changes, "updated": document.now(), "last_step": self.step}

        def merge(found: dict[str, Any]) -> dict[str, Any]:
            same_run = found.get("started") == self.data["started"]
            failures = found.get("failures", []) if same_run else []
            state = {"state": "failed", "explanation": found.get("explanation")} if failures else {}
            return {**self.data, "failures": failures, **state}

        self._update(merge)

    def fail(self, error: BaseException) -> None:
        """Record what ended the run on this rank; the first call counts."""
        if self.failure is not None:
            return
        self.failure = found = failure.describe(error, log.rank(), self.step, self.device.type)

        def merge(report: dict[str, Any]) -> dict[str, Any]:
            explanation = f"rank {found['rank']} failed in {found['phase']} after step {found['step']}: {found['type']}"
            failures = [*report.get("failures", []), found]
            return {**(report or self.data), "state": "failed", "explanation": explanation, "failures": failures}

        self._update(merge)
        if "memory" in found and found["memory"]:
            log.warn(_out_of_memory(found), every_rank=True)

    def _update(self, merge: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        try:
            files.update(self.folder, merge)
        except OSError as error:
            self.broken = True
            log.warn(f"the run report cannot be written: {error}", every_rank=True)

    def gather(self) -> None:
        """Collect the facts of all ranks and write them. Every rank must call this at the same point."""
        mine = {"rank": log.rank(), "hostname": socket.gethostname(), "pid": os.getpid(), **self.sections()}
        self.write(ranks=all_gather(mine))

    def sections(self) -> dict[str, Any]:
        """Return this rank's report sections from every plugin; a broken one is named and left out."""
        merged: dict[str, Any] = {}
        for sections in plugins.manager().hook.ascend_report_sections(run=self.run):
            merged |= sections
        return merged

    def close(self) -> None:
        """Say how the process ended; called at exit."""
        if self.failure is None:
            if self.trained:
                self.write(state="completed", explanation="", finished=document.now())
            if log.rank() == 0:
                from llamafactory_ascend.report.table import show

                show(files.read(self.folder / files.NAME), self.folder / files.NAME)


def _out_of_memory(found: dict[str, Any]) -> str:
    memory = found["memory"]
    return (
        f"out of device memory in {found['phase']} after step {found['step']}: "
        f"{memory['allocated']:,} bytes allocated, {memory['reserved']:,} reserved (peak {memory['peak_allocated']:,})"
    )


def all_gather(mine: Any) -> list[Any]:
    """Return every rank's object, in order of rank."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


_open: list[Report] = []  # the report of this process; a list, because a second training replaces the first


def begin(run: Run, versions: dict[str, str]) -> None:
    """Open the report of a training run, and learn of whatever ends the process."""
    assert run.arguments is not None
    folder = Path(run.arguments.training.output_dir)
    report = Report(run, folder, versions)
    if log.rank() == 0:
        try:
            files.set_aside(folder)
        except OSError as error:
            log.warn(f"an earlier report stays where it is: {error}")
    report.write()
    if not _open:
        atexit.register(lambda: _open[0].close())
        previous = sys.excepthook

        def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
            failed(error)
            previous(kind, error, trace)

        sys.excepthook = excepthook
    _open[:] = [report]


def failed(error: BaseException) -> None:
    """Record the exception that ends a run, if there is one to record it for."""
    if _open:
        _open[0].fail(error)


def current() -> Report | None:
    """Return the report of this process, None outside a training run."""
    return _open[0] if _open else None


def saved() -> None:
    """The last model of a training is on disk: collect what every rank knows."""
    if _open:
        _open[0].gather()
