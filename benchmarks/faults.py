"""What becomes of a run when something breaks: injected faults, one run of the stock command for each.

    python benchmarks/faults.py [--only PATTERN] [--jobs 2] [--work FOLDER] [--patience FACTOR]

A run has survived when the command ends in time, with the exit code and the message that name the cause,
when no checkpoint that was saved is changed or broken, and when none of its processes goes on. Where a fault
must not matter, the run has to complete. Devices are simulated. Progress goes to stderr, the table to stdout;
the last line of stdout is JSON. The exit code is 1 where a fault is not survived.
"""

import argparse
import json
import re
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the packages below, when run by its path

from benchmarks import faults_run  # noqa: E402
from benchmarks.faults_before import BEFORE  # noqa: E402
from benchmarks.faults_during import DURING  # noqa: E402
from benchmarks.faults_run import Fault, Outcome  # noqa: E402
from tests import assets  # noqa: E402
from tests.sim_npu.available import unavailable_reason  # noqa: E402

FAULTS = [*DURING, *BEFORE]  # the long ones first, so that no job ends alone
COLOURS = {"survived": "green", "lost": "red", "hung": "red", "not injected": "yellow"}
console = Console(stderr=True, highlight=False)


def chosen(pattern: str) -> list[Fault]:
    """Return the faults whose name, or what is done, matches a regular expression."""
    return [fault for fault in FAULTS if re.search(pattern, f"{fault.name}\n{fault.how}")]


def measure(faults: Sequence[Fault], work: Path, jobs: int, patience: float) -> Iterator[Outcome]:
    """Run them, ``jobs`` at a time, and yield what became of each as it ends."""
    missing = unavailable_reason()
    work.mkdir(parents=True, exist_ok=True)
    (work / "runs").mkdir(exist_ok=True)
    assets.build(work / "assets", ["data", "qwen3", "qwen3_5", "qwen25vl"])
    faults_run.make_seed(work)
    with ThreadPoolExecutor(jobs) as pool:
        waiting = []
        for fault in faults:
            if missing and (fault.npu or fault.ranks > 1):
                yield Outcome(fault, "not injected", (missing,), None, 0)
            else:
                waiting.append(pool.submit(faults_run.run, fault, work, patience))
        for done in as_completed(waiting):
            yield done.result()


def hear_signals() -> None:
    """Let runs hear what is ignored here (under nohup, behind a shell's `&`): programs inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def table(outcomes: Sequence[Outcome]) -> Table:
    """Lay out what became of each run."""
    found = Table(
        "fault", "what is done", "ranks", "exit", "s", "state", "what it must say, or why it is not survived"
    )
    for outcome in outcomes:
        fault = outcome.fault
        found.add_row(
            fault.name,
            escape(fault.how),
            str(fault.ranks),
            "-" if outcome.code is None else str(outcome.code),
            f"{outcome.seconds:.0f}",
            f"[{COLOURS[outcome.state]}]{outcome.state}",
            escape("; ".join(outcome.problems or fault.says)),
        )
    return found


def summarize(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Count; what could not be injected here is no fault that was."""
    count = Counter(outcome.state for outcome in outcomes)
    injected = len(outcomes) - count["not injected"]
    return {"faults": injected, **{state: count[state] for state in ("survived", "lost", "hung")}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Injected faults, and what becomes of the run.")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression for names")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="runs at a time (default: 2)")
    parser.add_argument(
        "--work", type=Path, help="folder for the runs, kept afterwards (default: a temporary one)"
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="FACTOR", help="multiplies every wait: a busy machine"
    )
    given = parser.parse_args()
    hear_signals()
    faults = chosen(given.only)
    if not faults:
        parser.error(f"no fault matches {given.only!r}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary, Progress(*columns, console=console) as progress:
        task = progress.add_task("models and data", total=len(faults))
        work = Path(given.work or temporary).resolve()
        for outcome in measure(faults, work, given.jobs, given.patience):
            outcomes.append(outcome)
            progress.update(task, advance=1, description=outcome.fault.name)
            state = f"[{COLOURS[outcome.state]}]{outcome.state:12}[/]"
            reason = escape("; ".join(outcome.problems))
            progress.print(f"{state} {outcome.fault.name} {reason}", soft_wrap=True)
    outcomes.sort(key=lambda outcome: FAULTS.index(outcome.fault))
    Console(width=None if sys.stdout.isatty() else 170).print(table(outcomes))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    console.print(f"{used.ru_utime + used.ru_stime:.0f} s of CPU time")
    figures = summarize(outcomes)
    print(json.dumps(figures))
    raise SystemExit(figures["survived"] < figures["faults"])


if __name__ == "__main__":
    main()
