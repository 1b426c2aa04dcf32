"""bfloat16 where the SoC has it; what is refused, and what a run is told about its precision."""

from types import SimpleNamespace
from typing import Any

import pytest

from llamafactory_ascend.device import Device
from llamafactory_ascend.features.precision import decide, judge

NEW = Device("npu", "Ascend910B3", 8, False, "")
OLD = Device("npu", "Ascend910A", 8, False, "", bfloat16=False)


@pytest.mark.parametrize(
    ("recipe", "instead"),
    [
        (
            {"bf16": True},
            "`bf16: true`, but Ascend910A does not compute in bfloat16; write `fp16: true` instead",
        ),
        ({"bf16": "True"}, "write `fp16: true` instead"),  # a word of the command line
        ({"bf16": 1}, "`bf16: true`"),
        ({"bf16": "yes"}, "`bf16: true`"),
        ({"pure_bf16": True}, "`pure_bf16: true`"),
        ({"bf16_full_eval": True}, "`bf16_full_eval: true`"),
        ({"infer_dtype": "bfloat16"}, "write `infer_dtype: float16` instead"),
    ],
)
def test_bfloat16_without_support_is_refused(recipe: dict[str, Any], instead: str) -> None:
    (finding,) = judge(recipe, OLD)
    assert finding.level == "error" and instead in finding.message
    assert judge(recipe, NEW) == []


@pytest.mark.parametrize(
    "recipe", [{}, {"bf16": False}, {"fp16": True}, {"infer_dtype": "bfloat16", "do_train": True}]
)
def test_other_recipes_pass(recipe: dict[str, Any]) -> None:
    assert judge(recipe, OLD) == []


@pytest.mark.parametrize(
    ("changes", "pure", "device", "choice", "reason"),
    [
        ({"bf16": True}, False, NEW, "bf16", "needs no loss scaling"),
        ({}, True, NEW, "bf16, weights included", "pure_bf16"),
        ({"fp16": True}, False, NEW, "fp16 with loss scaling", "starts at 65536"),
        ({"fp16": True}, False, OLD, "fp16 with loss scaling", "Ascend910A has no bfloat16"),
        ({}, False, NEW, "as the weights are loaded", "no autocast"),
    ],
)
def test_decision(changes: dict[str, bool], pure: bool, device: Device, choice: str, reason: str) -> None:
    found = decide(SimpleNamespace(**{"bf16": False, "fp16": False, **changes}), pure, device)
    assert found[0] == choice and reason in found[1]


def test_the_scale_is_what_is_said() -> None:
    import torch

    scaler = torch.amp.GradScaler("cpu")
    assert (scaler.get_scale(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (
        65536,
        0.5,
        2000,
    )
