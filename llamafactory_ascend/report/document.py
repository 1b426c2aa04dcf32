"""The report as plain data, and the verdict drawn from it."""

import datetime
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from llamafactory_ascend.run import Run

SCHEMA = 1
RUN_ID = "LLAMAFACTORY_ASCEND_RUN"  # set by the launcher for all ranks of a run
UNFINISHED = (
    "No process has finished this report: the run is still going, or it was killed (SIGKILL, SIGTERM, "
    "out of host memory, power, node loss) after the step in `last_step`."
)


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def run_key(environ: Mapping[str, str], count: int) -> str:
    """Return what names a run, the same on all its ranks and another for any other run.

    Args:
        environ: the environment of a rank: the launcher's id, or where another program has started the ranks
            their rendezvous (and, on a single node, their parent).
        count: how many runs this process has seen.
    """
    name = environ.get(RUN_ID)
    if not name and "MASTER_PORT" in environ:
        one_node = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
        parts = [environ.get(part, "") for part in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
        name = "-".join([*parts, str(os.getppid()) if one_node else ""]).strip("-")
    if not name:
        name = f"{socket.gethostname()}-{os.getpid()}-{now()}"
    return f"{name}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{count}"


def opening(run: Run, key: str, versions: dict[str, str], device: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a run that has just parsed its arguments."""
    return {
        "last_step": 0,
        "schema": SCHEMA,
        "state": "unfinished",
        "explanation": UNFINISHED,
        "max_steps": None,
        "run": key,
        "started": now(),
        "updated": now(),
        "finished": None,
        "process": {"hostname": socket.gethostname(), "pid": os.getpid(), "command": sys.argv},
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": versions,
        "device": device,
        "settings": run.settings.model_dump(),
        "failures": [],
        "ended_ranks": [],
        "launcher": None,
        "ranks": [],
        "patch_differences": [],
        **changing(run),
    }


def changing(run: Run) -> dict[str, Any]:
    """Return the parts that grow while a run goes on."""
    return {
        "decisions": {subject: asdict(decision) for subject, decision in run.decisions.items()},
        "findings": [asdict(finding) for finding in run.findings],
        "patches": [record.as_dict() for record in run.ledger.records.values()],
    }


def judged(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with the `state` and `explanation` that follow from its facts."""
    state, explanation = verdict(report)
    return {**report, "state": state, "explanation": explanation, "updated": now()}


def verdict(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return (state, explanation): the first failure counts, those of other ranks mostly follow from it."""
    said = []
    failures, launcher = report["failures"], report["launcher"]
    if failures:
        first = failures[0]
        if first["refused"]:
            return "refused", first["message"]
        said.append(failure_line(first))
        if len(failures) > 1:
            said.append(f"then failed: rank {list_ranks(failure['rank'] for failure in failures[1:])}")
    if launcher:
        code, missing = launcher["exit_code"], launcher["unfinished_ranks"]
        said.append(
            "the launcher was interrupted" if code is None else f"torchrun ended with exit code {code}"
        )
        if missing:
            said.append(f"killed or lost after step {report['last_step']}: rank {list_ranks(missing)}")
    if said:
        return "failed", "; ".join(said)
    return ("completed", "") if 0 in report["ended_ranks"] else ("unfinished", UNFINISHED)


def failure_line(failure: Mapping[str, Any]) -> str:
    """Return one sentence about a failure (see ``failure.describe``)."""
    where = f"rank {failure['rank']} failed in {failure['phase']}"
    when = f"after step {failure['step']}" if failure["step"] else "before the first step was done"
    return f"{where} {when}: {failure['type']}: {failure['headline']}".removesuffix(": ")


def list_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as short text: 0-3,6."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
