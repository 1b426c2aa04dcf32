"""Substitutes our rule into the hybrids of the Transformers on the path, and prints what came of it as JSON.

For each model, and for a substitution before the build, after it, and both: how many of the three DeltaNet
layers called rule and convolution, how far the logits are from stock's, and the probe's verdicts. Then two
samples packed in a row: how far stock's and our logits are from those of the samples alone.
"""

import json
from typing import Any

import torch
import transformers
from torch import Tensor

from llamafactory_ascend.kernels.substitution import Order, Substitutions, substitute
from tests.kernels import tiny
from tests.kernels.reference import error

RULE = {"gated_delta_rule": "pytorch", "causal_conv1d": "pytorch"}
MODELS = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_next": "qwen3_next",
}


def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    result: Tensor = model(input_ids=ids, use_cache=False, **kwargs).logits
    return result.detach()


def put(name: str, when: str) -> dict[str, Any]:
    """Substitute, run, and revert."""
    of, ids = (
        tiny.family(MODELS[name]),
        torch.randint(0, 60, (2, 70), generator=torch.Generator().manual_seed(1)),
    )
    stock = logits(tiny.build(name), ids)
    done, order = Substitutions(), Order(of, tiny.choose(of, RULE), False, print)
    if when != "after":
        substitute(done, order)
    model = tiny.build(name)
    if when != "before":
        substitute(done, order, model)
    calls = dict.fromkeys(RULE, 0)

    def count(operator: str) -> None:
        calls[operator] += 1

    for switch in done.switches.values():
        switch.counting, switch.armed = count, True
    distance = error(logits(model, ids), stock)
    passed = [switch.comparison is not None and switch.comparison.passed for switch in done.switches.values()]
    done.revert()
    reverted = torch.equal(logits(tiny.build(name), ids), stock)
    return {"calls": list(calls.values()), "distance": distance, "passed": passed, "reverted": reverted}


def pack(name: str) -> dict[str, float]:
    """Return the distances of packed samples from the same samples alone: stock's, ours, ours in two rows."""
    of, model = tiny.family(MODELS[name]), tiny.build(name)
    generator = torch.Generator().manual_seed(2)
    samples = [torch.randint(0, 60, (1, length), generator=generator) for length in (37, 70)]
    alone = torch.cat([logits(model, sample) for sample in samples], 1)
    row = torch.cat(samples, 1)
    positions = torch.cat([torch.arange(sample.shape[1]) for sample in samples])[None]
    stock = error(logits(model, row, position_ids=positions), alone)
    done, _ = tiny.put(model, of, tiny.choose(of, RULE, packed=True), packed=True)
    ours = error(logits(model, row, position_ids=positions), alone)
    two = error(logits(model, row.repeat(2, 1), position_ids=positions.repeat(2, 1)), alone.repeat(2, 1, 1))
    done.revert()
    return {"stock": stock, "ours": ours, "two_rows": two}


if __name__ == "__main__":
    found = {name: {when: put(name, when) for when in ("before", "after", "both")} for name in MODELS}
    packed = {name: pack(name) for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")}
    print(json.dumps({"version": transformers.__version__, "substituted": found, "packed": packed}))
