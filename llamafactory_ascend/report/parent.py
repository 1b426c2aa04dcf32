"""The launcher's share of the report: it outlives its ranks and says what they no longer can."""

import contextlib
import itertools
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llamafactory_ascend import log
from llamafactory_ascend.launching.torchrun import Signalled
from llamafactory_ascend.report import document, files, lifecycle


@contextlib.contextmanager
def watch(recipe: Any) -> Iterator[None]:
    """Name the run for all ranks, and close its report if torchrun, run inside, ends with an error.

    Args:
        recipe: what the host's ``read_args`` returns: a mapping, or the words of a command line.
    """
    previous = os.environ.get(document.RUN_ID)
    os.environ[document.RUN_ID] = name = uuid.uuid4().hex[:16]
    try:
        yield
    except (subprocess.CalledProcessError, Signalled, KeyboardInterrupt) as error:
        folder = output_dir(recipe)
        if folder is not None and lifecycle.current() is None:  # else the run is in this process
            code = exit_code(error)
            try:
                close(folder, name, code, os.environ)
            except Exception as problem:  # the user must see torchrun's error, not ours
                log.warn(f"the run report {folder / files.NAME} cannot be closed: {problem}")
        raise
    finally:
        if previous is None:
            os.environ.pop(document.RUN_ID, None)
        else:
            os.environ[document.RUN_ID] = previous


def exit_code(error: BaseException) -> int | None:
    """Return torchrun's exit code, None where the launcher was interrupted without it."""
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode
    return error.torchrun if isinstance(error, Signalled) else None


def output_dir(recipe: Any) -> Path | None:
    """Return the recipe's ``output_dir``, None where it names none."""
    if isinstance(recipe, Mapping):
        found = recipe.get("output_dir")
    else:
        words = [part for word in recipe for part in str(word).split("=", 1)]
        names = ("--output_dir", "--output-dir")  # argparse takes both, and the last one counts
        found = next((value for value, word in itertools.pairwise(words[::-1]) if word in names), None)
    return Path(str(found)).expanduser() if found else None


def close(folder: Path, name: str, exit_code: int | None, environ: Mapping[str, str]) -> None:
    """Write how torchrun ended and which ranks here had no last word; print the table on rank 0's node.

    Args:
        name: the run's name that the ranks were given; a report of another run is left alone.
        exit_code: None where the launcher itself was interrupted.
    """
    closed: dict[str, Any] = {}

    def change(report: dict[str, Any]) -> dict[str, Any] | None:
        if not document.has_launcher(report, name):
            return None  # no rank came as far as opening it
        lost = local_ranks(report["world_size"], environ) - set(report["ended_ranks"])
        missing = sorted(lost | set((report["launcher"] or {}).get("unfinished_ranks", ())))  # of other nodes
        launcher = {"exit_code": exit_code, "unfinished_ranks": missing, "finished": document.now()}
        closed.update(document.judged({**report, "launcher": launcher}))
        return closed

    if not folder.is_dir():
        return
    files.update(folder, change)
    if closed and (lost := document.lost_first(closed)):
        log.warn(
            f"lost: rank {document.list_ranks(lost)}, after step {closed['last_step']}; "
            "other failures may follow from it"
        )
    if closed and 0 in local_ranks(closed["world_size"], environ):
        from llamafactory_ascend.report.table import show

        show(closed, folder / files.NAME)


def local_ranks(world_size: int, environ: Mapping[str, str]) -> set[int]:
    """Return the ranks that a launcher starts on this node; all of them where only the rendezvous knows."""
    nodes, per_node = environ.get("NNODES", "1"), environ.get("NPROC_PER_NODE", "")
    if nodes == "1" or "RDZV_ID" in environ or not per_node.isdigit():
        return set(range(world_size))
    first = int(environ.get("NODE_RANK", "0")) * int(per_node)
    return set(range(first, first + int(per_node)))
