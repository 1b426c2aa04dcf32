"""Estimates many recipes, each in a fork of one process that has imported everything: JSON lines in and out.

A line in: `{"options": ..., "words": ..., "simulated": true}`, a line out: what `host/estimate.py` returns,
or `{"error": ...}`. With `simulated`, the operators that an NPU has as one and the simulated NPU computes in
parts are gone through in parts too, as their intermediate results are charged there.
"""

import json
import os
import sys
import traceback
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
    """Let fused operators be gone through as the simulated NPU computes them."""
    import torch
    import torch_npu.ops as simulated

    from llamafactory_ascend.memory import operators
    from llamafactory_ascend.memory.ledger import Ledger

    def function(forward: Any, backward: Any, setup: Any) -> Any:
        class Operator(torch.autograd.Function):
            @staticmethod
            def forward(*args: Any) -> Any:
                return forward(*args)

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                setup(ctx, inputs, output)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                return backward(ctx, *grads)

        return Operator.apply

    norm = function(simulated._rms_norm_forward, simulated._rms_norm_backward, simulated._rms_norm_setup)
    swiglu = function(simulated._swiglu_forward, simulated._swiglu_backward, simulated._swiglu_setup)
    rotary = function(simulated._rotary_forward, simulated._rotary_backward, simulated._rotary_setup)
    operators.OPERATORS.update(
        npu_rms_norm=lambda x, gamma, epsilon=1e-6: norm(x, gamma, epsilon),
        npu_swiglu=lambda x, dim=-1: swiglu(x, dim),
        npu_rotary_mul=lambda x, cos, sin: rotary(x, cos, sin, "half"),
    )
    dispatch, silu = Ledger.__torch_dispatch__, torch.ops.aten.silu_backward.default

    def dispatch_in_parts(book: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not silu:
            return dispatch(book, func, types, args, kwargs)
        with book:
            return func.decompose(*args, **(kwargs or {}))

    Ledger.__torch_dispatch__ = dispatch_in_parts  # type: ignore[method-assign]


def answer(job: dict[str, Any]) -> dict[str, Any]:
    from llamafactory_ascend.host import estimate

    try:
        if job["simulated"]:
            in_parts()
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
