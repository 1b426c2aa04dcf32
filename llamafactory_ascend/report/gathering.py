"""What every rank knows: its report sections and its patches, brought together."""

import os
import socket
from collections import defaultdict
from typing import Any

from llamafactory_ascend import log, plugins
from llamafactory_ascend.report.document import list_ranks
from llamafactory_ascend.report.files import plain
from llamafactory_ascend.run import Finding, Run

NOT_IN_PLACE = {"planned", "failed", "reverted"}


def sections(run: Run) -> dict[str, Any]:
    """Return this rank's sections of every plugin; a broken hook is left out (a finding: see ``plugins``)."""
    merged: dict[str, Any] = {}
    for found in plugins.manager().hook.ascend_report_sections(run=run):
        merged |= plain(found)
    return merged


def facts(run: Run, rank: int) -> dict[str, Any]:
    """Return what this rank contributes to a gathering, as plain data."""
    states = {record.patch.id: [str(record.state), record.reason] for record in run.ledger.records.values()}
    findings = [[finding.level, finding.subject, finding.message] for finding in run.findings]
    here = {"rank": rank, "hostname": socket.gethostname(), "pid": os.getpid()}
    return {**here, **sections(run), "patches": states, "findings": findings}


def all_gather(mine: Any) -> list[Any]:
    """Return every rank's object, in order of rank; every rank must call it at the same point."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(gathered, mine)
    except Exception as error:  # the run may go on without a report, and if it cannot it says why itself
        log.warn(f"the report knows this rank only: {type(error).__name__}: {error}", every_rank=True)
        return [mine]
    return gathered


def foreign_findings(ranks: list[dict[str, Any]]) -> list[Finding]:
    """Return what only other ranks than the first have found, with their names in the message."""
    known = [tuple(finding) for finding in ranks[0]["findings"]]
    others: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for entry in ranks[1:]:
        for level, subject, message in entry["findings"]:
            if (level, subject, message) not in known:
                others[level, subject, message].append(entry["rank"])
    return [
        Finding(level, subject, f"rank {list_ranks(who)}: {text}")  # type: ignore[arg-type]  # from a Finding
        for (level, subject, text), who in others.items()
    ]


def patch_differences(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the patches that do not stand alike on all ranks.

    Args:
        ranks: gathered ``facts``.

    Returns:
        For each such patch its ``id``, ``harmful`` (in place on some ranks, not on others) and ``states``:
        state (with its reason, if any) -> the ranks, as in "0-3,6".
    """
    states: dict[str, dict[int, tuple[str, str]]] = defaultdict(dict)
    for entry in ranks:
        for name, (state, reason) in entry["patches"].items():
            states[name][entry["rank"]] = (state, reason)
    everyone = {entry["rank"] for entry in ranks}
    found = []
    for name, by_rank in states.items():
        by_rank |= dict.fromkeys(everyone - by_rank.keys(), ("planned", "unknown to this rank"))
        kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, kind in by_rank.items():
            kinds[kind].append(rank)
        if len(kinds) > 1:
            missing = {state in NOT_IN_PLACE for state, _ in kinds}
            texts = {": ".join(filter(None, kind)): list_ranks(members) for kind, members in kinds.items()}
            found.append({"id": name, "harmful": len(missing) > 1, "states": texts})
    return found
