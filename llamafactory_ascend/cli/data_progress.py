"""How far the reading of data sets is, on stderr: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

EVERY = 5.0  # seconds between two lines where there is no terminal


class Progress:
    """``with Progress() as progress: progress.begin(name, bytes); progress.advance(bytes)``."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.bar: Any = None
        self.task: Any = None
        self.name, self.total, self.done, self.said = "", 0, 0, 0.0

    def __enter__(self) -> "Progress":
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bars

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self.bar = Bars(*columns, console=Console(file=sys.stderr), transient=True)
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, name: str, total: int) -> None:
        """Start with the next data set, of ``total`` bytes."""
        self.name, self.total, self.done, self.said = name, total, 0, time.monotonic()
        if self.bar is not None:
            self.task = self.bar.add_task(name, total=total)

    def advance(self, size: int) -> None:
        """Take note of bytes that were read."""
        self.done += size
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done)
        elif not self.quiet and time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            share = f"{100 * self.done / self.total:.0f} %" if self.total else "?"
            print(f"{self.name}: {share} of {self.total / 1e6:,.1f} MB read", file=sys.stderr, flush=True)
