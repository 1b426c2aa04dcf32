"""The probe of packed calls: what is compared, and that a kernel which mixes samples is found."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.kernels import causal_conv1d as ours
from llamafactory_ascend.kernels import samples
from llamafactory_ascend.kernels.backends import Backend
from llamafactory_ascend.kernels.gated_delta_rule import chunk_gated_delta_rule
from llamafactory_ascend.kernels.substitution import Substitutions
from llamafactory_ascend.kernels.switch import Switch
from tests.kernels import tiny

IDS = torch.randint(0, 60, (2, 70), generator=torch.Generator().manual_seed(1))
PACKED = torch.cat([torch.arange(30), torch.arange(40)])[None].expand(2, -1)
RULE = {"gated_delta_rule": "pytorch", "causal_conv1d": "pytorch"}
HERE = "tests.kernels.test_samples"


def leaky_rule(*args: Any, cu_seqlens: Any = None, **kwargs: Any) -> Any:
    """Right for whole rows, and says that it can keep samples apart."""
    return chunk_gated_delta_rule(*args, **kwargs)


def leaky_convolution(*args: Any, sequences: Any = None) -> Any:
    return ours.causal_conv1d(*args)


def with_rule(operator: str, *functions: str, packed: bool = True) -> tuple[Any, Substitutions, list[str]]:
    """A hybrid in a training step with these back ends of an operator, the first one first."""
    of, model = tiny.family("qwen3_5"), tiny.build("qwen3_5_text")
    choices = tiny.choose(of, RULE, packed=packed)
    usable = tuple(Backend(name, operator, f"{HERE}:{name}", varlen=True) for name in functions)
    usable += choices[operator].usable
    done, said = tiny.put(
        model, of, {**choices, operator: replace(choices[operator], usable=usable, explicit=False)}, packed
    )
    for switch in done.switches.values():
        switch.armed = True
    return model, done, said


def switch_of(done: Substitutions, operator: str) -> Switch:
    return next(one for one in done.switches.values() if one.operator == operator)


@pytest.mark.parametrize(
    "operator, leaky", [("gated_delta_rule", "leaky_rule"), ("causal_conv1d", "leaky_convolution")]
)
@pytest.mark.parametrize("positions", [PACKED, None], ids=["packed", "whole"])
def test_a_kernel_that_mixes_samples(operator: str, leaky: str, positions: Tensor | None) -> None:
    """Found although whole rows come out right, and although the first batch happens to hold whole rows."""
    model, done, said = with_rule(operator, leaky)
    try:
        model(input_ids=IDS, position_ids=positions, use_cache=False)
        switch = switch_of(done, operator)
        assert (switch.backend, list(switch.failures)) == ("pytorch", [leaky])
        assert "'packed output'" in switch.failures[leaky] and len(said) == 1
        assert switch.comparison is not None and switch.comparison.passed
        errors = switch.comparison.errors
        assert {f"packed {name}" for name in errors if "packed" not in name} <= set(errors)
        assert max(errors.values()) < 1e-5
    finally:
        done.revert()


def test_without_packing_it_is_not_asked_for() -> None:
    model, done, _ = with_rule("gated_delta_rule", "leaky_rule", packed=False)
    model(input_ids=IDS, use_cache=False)
    switch = switch_of(done, "gated_delta_rule")
    assert switch.backend == "leaky_rule" and switch.comparison is not None
    assert not any("packed" in name for name in switch.comparison.errors)
    done.revert()


def test_nothing_left_that_keeps_samples_apart() -> None:
    model, done, _ = with_rule("gated_delta_rule", "leaky_rule")
    switch_of(done, "gated_delta_rule")._waiting.pop()
    with pytest.raises(AscendError, match=r"leaky_rule: it differs .*cannot keep packed samples apart"):
        model(input_ids=IDS, position_ids=PACKED, use_cache=False)
    done.revert()


@pytest.mark.parametrize(
    "cu_seqlens, tokens, expected",
    [
        ([0, 30, 70, 100, 140], 70, (0, 0, [0, 30, 70])),
        ([0, 70, 100, 140], 70, (1, 0, [0, 30, 70])),
        ([0, 70, 140], 70, (0, 0, [0, 23, 70])),
        (None, 2, (0, 0, [0, 1, 2])),
        (None, 5000, (0, 0, [0, 341, 1024])),
        ([0, 3000, 3100, 5000], 5000, (0, 2488, [0, 512, 612, 1024])),
        ([0, 4999, 5000], 5000, (0, 3976, [0, 1023, 1024])),
        ([0, 1, 5000], 5000, (0, 0, [0, 1, 1024])),
        ([*range(0, 40, 2), 40], 40, (0, 0, [0, 2, 4, 6, 8, 10, 12, 14, 16])),
    ],
)
def test_the_stretch_holds_a_boundary(
    cu_seqlens: list[int] | None, tokens: int, expected: tuple[int, int, list[int]]
) -> None:
    assert samples.stretch(cu_seqlens, tokens) == expected
