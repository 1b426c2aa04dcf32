"""Estimates many recipes, each in a fork of one process that has imported everything: JSON lines in and out.

A line in: `{"options": ..., "words": ..., "simulated": true}`, a line out: what `host/estimate.py` returns,
or `{"error": ...}`. With `simulated`, the backward of SiLU, which an NPU has as one operator and the
simulated NPU computes in parts, is gone through in parts too, as intermediate results are charged there.
Without it the run is one that was published, of stock: accelerate makes float32 of all shares of FSDP2.
"""

import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def preload() -> None:
    """Import what every estimate needs."""
    import llamafactory.hparams.parser
    import llamafactory.model.loader
    import llamafactory.train.tuner  # noqa: F401

    import llamafactory_ascend.host.estimate
    import llamafactory_ascend.memory.fitting  # noqa: F401


def in_parts() -> None:
    """Let the backward of SiLU be gone through as the simulated NPU computes it."""
    import torch

    from llamafactory_ascend.memory.ledger import Ledger

    dispatch, silu = Ledger.__torch_dispatch__, torch.ops.aten.silu_backward.default

    def dispatch_in_parts(book: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not silu:
            return dispatch(book, func, types, args, kwargs)
        with book:
            return func.decompose(*args, **(kwargs or {}))

    Ledger.__torch_dispatch__ = dispatch_in_parts  # type: ignore[method-assign]


def as_stock_shards() -> None:
    """Let FSDP2 keep frozen weights in float32, as it does without the plugin."""
    from llamafactory_ascend.host import estimate

    ours = estimate.sharding

    def stock(training: Any, mixed: Any, model: Any) -> Any:
        policy = ours(training, mixed, model)
        return policy and replace(policy, frozen=policy.stored)

    estimate.sharding = stock


def answer(job: dict[str, Any]) -> dict[str, Any]:
    from llamafactory_ascend.host import estimate

    try:
        in_parts() if job["simulated"] else as_stock_shards()
        return estimate.estimate(job["options"], job["words"])
    except BaseException as error:  # SystemExit too: a refused recipe may end the process
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the host prints goes to stderr
    preload()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            out.write(json.dumps(answer(json.loads(line))) + "\n")
            out.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
