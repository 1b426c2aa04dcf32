"""The report as plain data."""

import datetime
import os
import socket
import sys
from dataclasses import asdict
from typing import Any

from llamafactory_ascend.run import Run

SCHEMA = 1
UNFINISHED = (
    "No process has finished this report: the run is still going, or it was killed (SIGKILL, power, node loss) "
    "after the step in `last_step`."
)


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def opening(run: Run, versions: dict[str, str], device: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a run that has just parsed its arguments."""
    return {
        "schema": SCHEMA,
        "state": "unfinished",
        "explanation": UNFINISHED,
        "started": now(),
        "updated": now(),
        "last_step": 0,
        "max_steps": None,
        "process": {"hostname": socket.gethostname(), "pid": os.getpid(), "command": sys.argv},
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": versions,
        "device": device,
        "settings": run.settings.model_dump(),
        "failures": [],
        "ranks": [],
        **changing(run),
    }


def changing(run: Run) -> dict[str, Any]:
    """Return the parts that grow while a run goes on."""
    return {
        "decisions": {subject: asdict(decision) for subject, decision in run.decisions.items()},
        "findings": [asdict(finding) for finding in run.findings],
        "patches": [record.as_dict() for record in run.ledger.records.values()],
    }
