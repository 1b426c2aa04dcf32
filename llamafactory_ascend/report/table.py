"""The report as a table in the log."""

import contextlib
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llamafactory_ascend.report.document import failure_line, list_ranks
from llamafactory_ascend.run import Finding

MIB = 1 << 20
WIDTH = 110  # a log file is not a terminal: rich would fold the table at 80 columns
NAME_WIDTH = 36
LONGEST_SECTION = 500  # characters
ENVIRONMENT = "environment."  # the decisions about environment variables start with it
ABOUT_THE_RANK = {"rank", "hostname", "pid"}
Row = tuple[str, str]


def show(report: dict[str, Any], path: Path) -> None:
    """Print the report on stderr, where the host logs; nothing where there is no report."""
    if report:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed; the file is written all the same
            print(draw(report, path, sys.stderr), file=sys.stderr, flush=True)


def draw(report: dict[str, Any], path: Path, file: IO[str]) -> str:
    """Return the table as text for a terminal or a pipe: a line for each thing a reader asks after a run."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    title = f"llamafactory-ascend: {report['state']}"
    table = Table(title=title, show_header=False, title_justify="left", box=box.SIMPLE)
    table.add_column(style="bold", overflow="fold", max_width=NAME_WIDTH)
    table.add_column(overflow="fold")
    for name, value in rows(report):
        table.add_row(Text(name), Text(value))  # Text: a path or message with [brackets] is no markup
    with console.capture() as captured:
        console.print(table)
    drawn = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*drawn, f"  report: {path}"])  # below the table: a folded path could not be copied


def rows(report: dict[str, Any]) -> list[Row]:
    """Return (name, text) of each line."""
    device, world = report["device"], report["world_size"]
    found = [("explanation", report["explanation"])] if report["explanation"] else []
    found.append(("steps", f"{report['last_step']} of {report['max_steps'] or '?'}"))
    ranks = f"{world} ranks" if world > 1 else "1 rank"
    simulated = " (simulated NPU)" if device["simulated"] else ""
    found.append(("device", f"{ranks}, {device['name']}{simulated}"))
    for number, failure in enumerate(report["failures"]):
        found += _failure(failure, said=number == 0 or report["state"] == "stopped")
    found += _decisions(report["decisions"])
    found += _sections(report["ranks"])
    found += _patches(report)
    refused = report["explanation"] if report["state"] == "refused" else ""
    for finding in report["findings"]:
        sentence = Finding(**finding).sentence()
        if finding["level"] != "error" or sentence not in refused:  # the explanation of a refusal says it
            found.append((finding["level"], sentence))
    return found


def _decisions(decisions: Mapping[str, Mapping[str, str]]) -> list[Row]:
    """Return a line per decision; the environment variables, whose names are long, share one."""
    found, variables = [], []
    for name, decision in decisions.items():
        if name.startswith(ENVIRONMENT):
            variables.append(f"{name.removeprefix(ENVIRONMENT)}={decision['choice']} ({decision['reason']})")
        elif name != "device":  # it stands at the top
            found.append((name, f"{decision['choice']} ({decision['reason']})"))
    return found + ([("environment", "; ".join(variables))] if variables else [])


def _failure(failure: Mapping[str, Any], said: bool) -> list[Row]:
    found = [] if said else [("then", failure_line(failure))]  # the explanation starts with the first
    if memory := failure["memory"]:
        keys = ("allocated", "reserved", "peak_allocated", "peak_reserved")
        found.append((f"memory (rank {failure['rank']})", _memory(memory, keys)))
    return found


def _patches(report: dict[str, Any]) -> list[Row]:
    patches = report["patches"]
    needless = [patch for patch in patches if patch["state"] == "skipped" and not patch["source"]]
    waiting = [patch["id"] for patch in patches if patch["state"] == "planned" or patch in needless]
    off = [patch for patch in patches if patch["state"] in ("failed", "skipped", "reverted")]
    off = [patch for patch in off if patch not in needless]
    text = f"{len(patches) - len(waiting) - len(off)} of {len(patches)} in place"
    harmful = [difference for difference in report["patch_differences"] if difference["harmful"]]
    if len(report["ranks"]) > 1:
        text += " on rank 0, others differ" if harmful else " on every rank"
    if waiting:
        text += f"; not needed here: {', '.join(waiting)}"
    found = [("patches", text)]
    found += [(f"patch {patch['id']}", f"{patch['state']}: {patch['reason']}".rstrip(": ")) for patch in off]
    for difference in harmful:
        states = "; ".join(f"rank {ranks} {state}" for state, ranks in difference["states"].items())
        found.append((f"patch {difference['id']}", states))
    return found


def _sections(ranks: list[dict[str, Any]]) -> list[Row]:
    """Return a line per section where all ranks say the same, else one per group of ranks that do."""
    found: list[Row] = []
    names = dict.fromkeys(name for rank in ranks for name in rank if name not in ABOUT_THE_RANK)
    for name in names:
        if name == "memory":
            found += _peaks(ranks)
            continue
        groups: dict[tuple[Row, ...], list[int]] = defaultdict(list)
        for rank in ranks:
            section = rank.get(name)
            title, draw_section = KNOWN.get(name, (name, _section))
            lines = [] if section is None or section == {} else draw_section(section)
            groups[tuple((f"{title} {label}".strip(), text) for label, text in lines)].append(rank["rank"])
        speaking = {group: members for group, members in groups.items() if group}
        for group, members in speaking.items():
            where = "" if len(speaking) == 1 else f" (rank {list_ranks(members)})"
            found += [(label + where, text) for label, text in group]
    return found


def _section(section: Any) -> list[Row]:
    """Return the lines of a section nobody here knows: its values on one, each problem on its own."""
    if section is None or section == {}:
        return []
    if not isinstance(section, Mapping):
        return [("", _value(section))]
    texts = ["ok" if section["ok"] else "NOT OK"] if "ok" in section else []
    for key, value in section.items():
        if key not in ("problems", "warnings", "ok") and value not in (None, "", [], {}):
            texts.append(f"{key.replace('_', ' ')} {_value(value)}")
    text = ", ".join(texts)
    if len(text) > LONGEST_SECTION:
        text = f"{text[:LONGEST_SECTION]}... (all of it is in the file)"
    found = [("", text)] if text else []
    found += [("problem", str(problem)) for problem in section.get("problems") or []]
    return found + [("warning", str(warning)) for warning in section.get("warnings") or []]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_value(item)}" for key, item in value.items()) + ")"
    if isinstance(value, list):
        if value and isinstance(value[0], Mapping):
            return str(len(value))  # what each is stands in the file
        shown = ", ".join(_value(item) for item in value[:3])
        return shown if len(value) <= 3 else f"{shown} and {len(value) - 3} more"
    return str(value)


def _checkpointing(counts: Mapping[str, Any]) -> list[Row]:
    done, due, kept = counts["checkpointed"], counts["expected"], counts.get("kept", {})
    parts = [
        f"{component} {done.get(component, 0)} of {due.get(component, 0)} expected"
        + (f", {kept[component]} kept" if component in kept else "")
        + f" ({total} layers)"
        for component, total in counts["layers"].items()
    ]
    return [("", ", ".join(parts)), *(("problem", str(problem)) for problem in counts.get("problems") or [])]


def _gradients(audit: Mapping[str, Any]) -> list[Row]:
    reasons = [f"{found['tensors']}: {reason}" for reason, found in audit["without_gradient"].items()]
    excused = f" or with a reason ({'; '.join(reasons)})" if reasons else ""
    if audit["problems"]:
        text = f"NOT OK, {audit['trainable']:,} trainable, not all with a gradient{excused}"
    else:
        text = f"ok, {audit['trainable']:,} trainable, all with a gradient{excused}"
    return [("", text), *(("problem", str(problem)) for problem in audit["problems"])]


def _adapter(adapter: Mapping[str, Any]) -> list[Row]:
    shown = dict(adapter)
    if checkpoints := adapter.get("checkpoints"):
        good = sum(1 for checkpoint in checkpoints.values() if checkpoint["ok"])
        name, last = list(checkpoints.items())[-1]
        shown["checkpoints"] = f"{good} of {len(checkpoints)} ok, the last {name} {last['sha256']}".rstrip()
    return _section(shown)


def _kernels(kernels: Mapping[str, Any]) -> list[Row]:
    """Return a line per replaced operator: how many modules called it, how far it was from the old code."""
    errors: dict[str, list[float]] = defaultdict(list)
    for switch in kernels["switches"]:
        errors[switch["operator"]] += (switch["probe"] or {}).get("errors", {}).values()
    found = []
    for operator, counts in (kernels["attested"] or {}).items():
        text = f"{', '.join(counts['backends'])}, called by {counts['called']} of {counts['modules']} modules"
        if errors[operator]:
            # Whole percents: the ranks' own tensors differ, and each difference would be a line of its own.
            text += f", within {math.ceil(max(errors[operator]) * 100)} % of the old code"
        found.append((operator, text))
    return found


def _targets(targets: Mapping[str, Any]) -> list[Row]:
    modules = ", ".join(f"{component} {count}" for component, count in targets["modules"].items())
    trainable = sum(targets["trainable"].values())
    share = f"{trainable:,} trainable of {targets['parameters']:,} ({targets['percent']:.4g} %)"
    return [("", f"{modules} modules by {targets['from']}, {share}")]


def _lengths(lengths: Mapping[str, Any]) -> list[Row]:
    counted, share = lengths["counted"], lengths["supervised"]
    part = "" if counted == lengths["rows"] else f", {counted:,} of them counted"
    sizes = f"mean {lengths['mean']:,} tokens, 95 % {lengths['percentiles']['95']:,}"
    text = f"{lengths['rows']:,} rows{part}, {sizes}, longest {lengths['percentiles']['max']:,}"
    cut, cutoff = lengths["over_cutoff"], lengths["cutoff_len"]
    text += f"; cutoff_len {cutoff:,} cuts {cut:,} ({100 * cut / counted:.1f} %)"
    if share["lost"]:
        text += f" and {100 * share['lost'] / share['total']:.1f} % of the tokens that are trained on"
    return [("", text)]


# how a section of our own is shown: its name, and what makes its lines
KNOWN: dict[str, tuple[str, Callable[[Any], list[Row]]]] = {
    "checkpointing": ("checkpointed layers", _checkpointing),
    "gradients": ("gradients", _gradients),
    "adapter": ("adapter", _adapter),
    "kernels": ("kernels", _kernels),
    "targets": ("targets", _targets),
    "lengths": ("lengths of rows", _lengths),
}


def _peaks(ranks: list[dict[str, Any]]) -> list[Row]:
    known = [rank for rank in ranks if rank.get("memory")]
    if not known:
        return []
    most = max(known, key=lambda rank: rank["memory"]["peak_allocated"])
    text = _memory(most["memory"], ("peak_allocated", "peak_reserved"))
    if len(known) > 1:
        least = min(rank["memory"]["peak_allocated"] for rank in known)
        text += f"; rank {most['rank']} of {len(known)}, the least {least / MIB:,.1f} MiB"
    return [("memory", text)]


def _memory(memory: Mapping[str, int], keys: tuple[str, ...]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {memory[key] / MIB:,.1f} MiB" for key in keys)
