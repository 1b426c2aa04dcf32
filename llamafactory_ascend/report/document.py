"""The report as plain data, and the verdict drawn from it."""

import datetime
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from llamafactory_ascend.run import Run

SCHEMA = 2  # 1 had no state `stopped`: it was `failed`
RUN_ID = "LLAMAFACTORY_ASCEND_RUN"  # set by the launcher for all ranks of a run
PEER_GONE = re.compile(  # what gloo, HCCL and NCCL make of a rank that has died
    r"DistBackendError|DistNetworkError|Connection (closed|reset|refused)|Broken pipe|Socket Timeout"
    r"|gloo|HCCL|NCCL|ERR02\d{3}|EI0002",
    re.IGNORECASE,
)
UNFINISHED = (
    "No process has finished this report: the run is still going, or it was killed (SIGKILL, SIGTERM, "
    "out of host memory, power, node loss) after the step in `last_step`."
)


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def spans_nodes(environ: Mapping[str, str]) -> bool:
    """True where the ranks of this run were started by several launchers, one per node."""
    return environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE")


def run_name(environ: Mapping[str, str]) -> str:
    """Return what names a run on this node, the same on all ranks here and another for any other run.

    Args:
        environ: the environment of a rank: the launcher's id, or where another program has started the ranks
            their rendezvous and, on a single node, their parent; a rendezvous of nodes can be used again.
    """
    name = environ.get(RUN_ID)
    if not name and "MASTER_PORT" in environ:
        parts = [environ.get(part, "") for part in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
        name = "-".join([*parts, now() if spans_nodes(environ) else str(os.getppid())]).strip("-")
    return name or f"{socket.gethostname()}-{os.getpid()}-{now()}"


def run_key(names: Iterable[str], environ: Mapping[str, str], count: int) -> str:
    """Return what names a run on all its ranks.

    Args:
        names: ``run_name`` of every rank, or of one where they do not differ.
        count: how many runs this process has seen.
    """
    return f"{'+'.join(dict.fromkeys(names))}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{count}"


def has_launcher(report: Mapping[str, Any], name: str) -> bool:
    """True where the launcher with this id has started ranks of the run."""
    return name in str(report.get("run", "")).partition(".")[0].split("+")


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
        "process": {"hostname": socket.gethostname(), "pid": os.getpid(), "command": sys.orig_argv},
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


def lost_first(report: Mapping[str, Any]) -> list[int]:
    """Return the ranks whose silent death came first, [] where another failure explains theirs.

    torchrun kills the other ranks once one has failed, so a rank without a last word is no cause by itself.
    It is one where nobody failed, or where the first failure only says that a peer's connection has gone.
    """
    failures, launcher = report["failures"], report["launcher"]
    if not launcher or launcher["exit_code"] is None:
        return []
    return list(launcher["unfinished_ranks"]) if not failures or speaks_of_peer(failures[0]) else []


def speaks_of_peer(failure: Mapping[str, Any]) -> bool:
    """True for a failure that follows from another rank's."""
    return bool(PEER_GONE.search(f"{failure['type']}: {failure['message']}"))


def was_stopped(report: Mapping[str, Any]) -> bool:
    """True where a signal has ended the first rank, at a place of its own, then the others, and none is lost.

    What the others say is the same, or that it has gone: loading and a full-size step are not waited for.
    """
    failures, launcher = report["failures"], report["launcher"]
    if not failures or not failures[0]["stopped"]:
        return False
    if not all(failure["stopped"] or speaks_of_peer(failure) for failure in failures):
        return False
    # A torchrun that was killed takes the code of its signal, below 0; its ranks are stopped in its place.
    return not launcher or not (launcher["unfinished_ranks"] or (launcher["exit_code"] or 0) < 0)


def verdict(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return (state, explanation): the first failure counts, those of other ranks mostly follow from it."""
    said = []
    failures, launcher, lost = report["failures"], report["launcher"], lost_first(report)
    if failures and failures[0]["refused"]:
        return "refused", failures[0]["message"]
    if was_stopped(report):
        return "stopped", failures[0]["message"]
    if lost:
        said.append(f"killed or lost after step {report['last_step']}: rank {list_ranks(lost)}")
    if failures:
        said.append(("then " if lost else "") + failure_line(failures[0]))
        if len(failures) > 1:
            said.append(f"then failed: rank {list_ranks(failure['rank'] for failure in failures[1:])}")
    if launcher:
        code, missing = launcher["exit_code"], set(launcher["unfinished_ranks"]) - set(lost)
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
