"""Judges a recipe as a training would, and stops before the model: ``python -P -m <this> FILE RECIPE``.

Parsing opens the device and the process group, and a broken recipe may end the process, so it has one of its
own. What was found is appended to FILE, one JSON line per stage, as ``host/probe.py`` does.
"""

import inspect
import os
import sys
from dataclasses import asdict
from pathlib import Path

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import devices
from llamafactory_ascend.host.probe import Log
from llamafactory_ascend.launching import lock

# A rank alone, at a port of its own: the one the user has chosen may belong to a training that goes on.
ONE_RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}  # fmt: skip


def preflight(log: Log, words: list[str]) -> None:
    """Parse the recipe as rank 0 of all ranks, run every hook before the model, record what they say."""
    from llamafactory_ascend import run

    now = run.current()
    try:
        if log.stage("arguments", lambda: parse(words)):
            log.stage("judgement", _judge)
    finally:
        log.write(
            stage="said",
            state="done",
            value={
                "findings": [asdict(finding) for finding in now.findings],
                "decisions": [asdict(decision) for decision in now.decisions.values()],
            },
        )


def parse(words: list[str]) -> None:
    """Parse without writing anything: the patched function would begin a report in output_dir."""
    from llamafactory.hparams import parser

    from llamafactory_ascend import run
    from llamafactory_ascend.host import arguments, launching, platform, seams

    seams.ledger()
    sys.argv = ["llamafactory-cli", *words]
    launching.check(words)  # what the launcher refuses before it starts a rank
    arguments.fill_environment("train")
    platform.before_launch()
    ranks = _ranks()
    if ranks:
        os.environ |= {**ONE_RANK, "WORLD_SIZE": str(ranks)}
    args = parser.read_args(None)
    args = platform.before_parsing(args, arguments.take_settings(args)[1])
    if ranks:
        os.environ |= ONE_RANK  # a process group of all would wait for the others
    now = run.current()
    now.arguments = run.Arguments(*inspect.unwrap(parser.get_train_args)(args))
    if ranks:
        now.arguments.training.distributed_state.num_processes = ranks  # TrainingArguments.world_size
    try:
        lock.look(Path(now.arguments.training.output_dir), lock.this_process("", ""))
    except AscendError as error:
        now.record(run.Finding("error", "output_dir", str(error)))


def _ranks() -> int:
    """Return how many ranks the host's launcher would have torchrun start, 0 if it would not start it."""
    from llamafactory.extras import misc

    visible = misc.get_device_count()
    forced = misc.is_env_enabled("FORCE_TORCHRUN") or misc.is_env_enabled("USE_MCA")
    if forced or (visible > 1 and not misc.use_ray() and not misc.use_kt()):
        return devices.launched_ranks(visible, os.environ)
    return 0


def _judge() -> None:
    from llamafactory_ascend import run
    from llamafactory_ascend.host import arguments

    now = run.current()
    assert now.arguments is not None
    now.judge_early_misses()
    arguments.examine(now, now.arguments)


if __name__ == "__main__":
    preflight(Log(Path(sys.argv[1])), sys.argv[2:])
