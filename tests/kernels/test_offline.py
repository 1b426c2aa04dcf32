"""The offline check: right back ends pass every case, each kind of mistake is found and named."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from llamafactory_ascend.kernels import offline, offline_cases, references
from llamafactory_ascend.kernels.backends import BUILT_IN, Backend
from llamafactory_ascend.kernels.gated_delta_rule import chunk_gated_delta_rule
from llamafactory_ascend.kernels.operators import OPERATORS
from llamafactory_ascend.kernels.selection import Conditions
from tests.conftest import SIMULATOR_MISSING
from tests.kernels.reference import error, make_case, recurrent_gated_delta_rule

needs_npu = pytest.mark.skipif(bool(SIMULATOR_MISSING), reason=str(SIMULATOR_MISSING))
CASES = {(case.operator, case.name): case for case in offline_cases.all_cases()}
RULES = [case for case in CASES.values() if case.operator == "gated_delta_rule"]
(RULE,) = (one for one in BUILT_IN if (one.operator, one.name) == ("gated_delta_rule", "pytorch"))


def broken(function: str, **changes: Any) -> Backend:
    """Return the rule with one of the functions below in its place."""
    return dataclasses.replace(RULE, name=function, target=f"{__name__}:{function}", **changes)


def scaled(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    return chunk_gated_delta_rule(query, *args, **kwargs, scale=1.05 / math.sqrt(query.shape[3]))


def leaking(*args: Any, **kwargs: Any) -> Any:
    return chunk_gated_delta_rule(*args, **{**kwargs, "cu_seqlens": None})


def without_decay_gradient(*args: Any, g: Tensor, **kwargs: Any) -> Any:
    return chunk_gated_delta_rule(*args, g=g.detach() + 0 * g.sum(), **kwargs)


def not_a_number_in_padding(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    padding = query.abs().sum((2, 3), keepdim=True) == 0
    output, state = chunk_gated_delta_rule(query, *args, **kwargs)
    return output.masked_fill(padding, math.nan), state


def too_short(*args: Any, **kwargs: Any) -> Any:
    return chunk_gated_delta_rule(*args, **kwargs)[0][:, :-1], None


def failing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("unified buffer overflow\nat line 3")


def found_by(backend: Backend, dtype: str = "float32") -> dict[str, offline.Verdict]:
    """Return the verdicts that the back end does not pass, by case."""
    verdicts = (offline.check(backend, case, dtype, "cpu") for case in RULES if offline.suits(backend, case))
    return {verdict.case: verdict for verdict in verdicts if not verdict.passed}


@pytest.mark.parametrize("dtype", offline.LIMITS)
def test_ours_are_right_on_a_cpu(dtype: str) -> None:
    usable, refused = offline.sort_out(BUILT_IN, Conditions("cpu", "CPU"))
    assert [backend.operator for backend in usable] == ["causal_conv1d", "gated_delta_rule"]
    assert len(usable) + len(refused) == len(BUILT_IN) and all(reason for _, reason in refused)
    for backend in usable:
        verdicts = [
            offline.check(backend, case, dtype, "cpu")
            for case in CASES.values()
            if offline.suits(backend, case)
        ]
        assert [verdict.as_dict() for verdict in verdicts if not verdict.passed] == []
        assert max(verdict.worst[1] for verdict in verdicts) < offline.LIMITS[dtype] / 4


@needs_npu
def test_torch_npus_are_right_on_the_simulated_npu() -> None:
    """Every fused operator goes through its case; each operator has one."""
    assert {case.operator for case in CASES.values()} == set(OPERATORS)
    usable, _ = offline.sort_out(BUILT_IN, Conditions("npu", "Ascend910B3"))
    fused = [backend for backend in usable if backend.name == "torch_npu"]
    assert {backend.operator for backend in fused} == set(OPERATORS) - {"gated_delta_rule", "causal_conv1d"}
    for backend in fused:
        for case in (case for case in CASES.values() if offline.suits(backend, case)):
            for dtype, limit in offline.LIMITS.items():
                verdict = offline.check(backend, case, dtype, "npu")
                assert verdict.passed and 0 < verdict.worst[1] < limit / 4, verdict.as_dict()


def test_a_wrong_scale() -> None:
    """Found in every dtype and case, in the output and in the gradients."""
    assert set(found_by(broken("scaled"))) == {case.name for case in RULES}
    verdict = found_by(broken("scaled"), "bfloat16")["2 rows of 200 tokens"]
    assert verdict.errors["output"] == pytest.approx(0.05, rel=0.1)


def test_samples_that_leak() -> None:
    assert set(found_by(broken("leaking"))) == {"packed samples"}
    assert found_by(broken("leaking", varlen=False)) == {}  # which nobody would give packed samples to


def test_a_missing_gradient() -> None:
    verdict = found_by(broken("without_decay_gradient"))["2 rows of 200 tokens"]
    assert verdict.worst == ("d_g", 1.0) and verdict.errors["output"] < 1e-6


def test_no_number_in_padding() -> None:
    found = found_by(broken("not_a_number_in_padding"))
    assert set(found) == {"a row of padding"}
    assert json.loads(json.dumps(found["a row of padding"].as_dict()))["errors"]["output"] == "nan"


def test_a_back_end_that_fails() -> None:
    found = found_by(broken("failing"))
    assert len(found) == len(RULES)
    assert {verdict.failure for verdict in found.values()} == {"RuntimeError: unified buffer overflow"}
    assert all(verdict.failure for verdict in found_by(broken("too_short")).values())


def test_the_reference_is_the_recurrence() -> None:
    """Against the tests' own, which is written down another way; with grouped heads and packed samples."""
    case = make_case("slow", batch=1, tokens=150, key_heads=2, value_heads=4)
    query, key, value, g, beta, _ = (x.double() for x in case)
    for bounds in (None, [0, 40, 41, 150]):
        expected, _ = recurrent_gated_delta_rule(query, key, value, g, beta, cu_seqlens=bounds)
        assert error(references.gated_delta_rule(query, key, value, g, beta, bounds), expected) < 1e-6


def test_full_size_compares_the_first_and_the_last_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a smaller size here: a mistake in the last head alone is found, and no peak is made up on a CPU."""
    small = offline_cases.rule_case("small", offline_cases.rule_tensors(1, 130, 4, 12, 32))
    monkeypatch.setattr(offline, "full_size", lambda: small)
    verdict = offline.check_full_size(RULE, "cpu")
    assert verdict.passed and verdict.peak is None and set(verdict.errors) == {
        "output", "d_query", "d_key", "d_value", "d_g", "d_beta",
    }  # fmt: skip
    assert not offline.check_full_size(broken("wrong_in_the_last_head"), "cpu").passed
    shapes = {name: list(x.shape) for name, x in offline_cases.full_size().tensors.items()}
    assert str(shapes["value"]) == offline_cases.FULL and shapes["key"] == [1, 4096, 16, 128]


def wrong_in_the_last_head(*args: Any, **kwargs: Any) -> Any:
    output, state = chunk_gated_delta_rule(*args, **kwargs)
    factor = torch.ones(output.shape[2], 1)
    factor[-1] = 2
    return output * factor.to(output.dtype), state


@needs_npu
def test_full_size_counts_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    small = offline_cases.rule_case("small", offline_cases.rule_tensors(1, 130, 4, 12, 32))
    monkeypatch.setattr(offline, "full_size", lambda: small)
    peak = offline.check_full_size(RULE, "npu").peak
    inputs = sum(x.numel() * 2 for x in small.tensors.values())
    assert peak is not None and 2 * inputs < peak < 200 * inputs
