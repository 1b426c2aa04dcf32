"""The host's own patch and port: passed by, called and reported, or given what it takes."""

import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llamafactory_ascend import run as run_module
from llamafactory_ascend.host import kernels as host
from llamafactory_ascend.kernels.forms import FORMS
from llamafactory_ascend.kernels.gated_delta_rule import chunk_gated_delta_rule
from llamafactory_ascend.settings import read
from tests.features.test_kernels import RULE, arguments, forget, prepare
from tests.kernels import tiny
from tests.kernels.reference import error, make_case


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[run_module.Run]:
    now = run_module.current()
    monkeypatch.setattr(now, "arguments", arguments("cpu"))
    now.decisions.clear()
    now.findings.clear()
    yield now
    forget()
    now.decisions.clear()
    now.findings.clear()


def port(*args: Any, **kwargs: Any) -> None:
    """Stands for the host's kernel."""


port.__module__ = host.PORT


def reaches(count: int) -> Any:
    """Return a patch of the host that replaces the rule in so many layers."""

    def patch(model: Any) -> None:
        holders = [module for module in model.modules() if "chunk_gated_delta_rule" in vars(module)]
        for module in holders[:count]:
            module.chunk_gated_delta_rule = port

    return patch


@pytest.mark.parametrize("count, state", [(0, "failed"), (2, "failed"), (3, "applied")])
def test_its_patch_is_reported(fresh: run_module.Run, count: int, state: str) -> None:
    """On a dense model it reaches nothing; a warning says what to do."""
    host.patch_qwen3_5_forward_npu(reaches(count), tiny.build("qwen3_5_text"))
    decision = fresh.decisions["kernels.host_patch"]
    assert (decision.choice, decision.reason) == (state, f"{count} of 3 layers hold the host's kernel")
    assert ["ascend: {kernels: auto}" in finding.message for finding in fresh.findings] == [True] * (
        count < 3
    )


@pytest.mark.parametrize(
    "setting, level", [("auto", "warning"), ("off", "note"), ({"gated_delta_rule": "off"}, "note")]
)
def test_its_failure_is_no_warning_where_the_rule_is_left_alone(
    fresh: run_module.Run, monkeypatch: pytest.MonkeyPatch, setting: Any, level: str
) -> None:
    monkeypatch.setattr(fresh, "settings", read({"kernels": setting}, "test.yaml"))
    host.patch_qwen3_5_forward_npu(reaches(0), tiny.build("qwen3_5_text"))
    assert [finding.level for finding in fresh.findings] == [level]


def test_its_patch_is_passed_by(fresh: run_module.Run) -> None:
    """Never both: it would put its kernel over ours, or end the run where triton-ascend is broken."""
    prepare(RULE, device="cpu")

    def broken(model: Any) -> None:
        raise ImportError("triton")

    host.patch_qwen3_5_forward_npu(broken, tiny.build("qwen3_5_text"))
    assert fresh.decisions["kernels.host_patch"].choice == "not applied"


@pytest.mark.parametrize("command", ["evaluation", "chat"])
def test_outside_training_nothing_is_said(
    fresh: run_module.Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The plugin replaces nothing there; the host's patch does what it does in stock."""
    monkeypatch.setattr(
        fresh, "arguments", arguments("cpu", do_train=False) if command == "evaluation" else None
    )
    model = tiny.build("qwen3_5_text")
    host.patch_qwen3_5_forward_npu(reaches(2), model)
    assert len([one for one in model.modules() if getattr(one, "chunk_gated_delta_rule", None) is port]) == 2
    assert fresh.decisions == {} and fresh.findings == []


def test_its_port_gets_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 is cast, keys are repeated, the decay is float32, and arguments that it lacks are dropped."""
    seen: dict[str, Any] = {}

    def theirs(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: Any = None,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Any = None,
    ) -> Any:
        seen.update(q=q, k=k, v=v, g=g)
        return chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    module = ModuleType(host.PORT)
    module.chunk_gated_delta_rule = theirs  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec(host.PORT, None)
    monkeypatch.setitem(sys.modules, host.PORT, module)
    (backend,) = host.BACKENDS
    case = make_case(batch=2, key_heads=3, value_heads=6)
    rule = FORMS["delta_rule"].adapt(backend.load(), backend)
    output, state = rule(
        *case[:3], g=case.g.bfloat16(), beta=case.beta, use_qk_l2norm_in_kernel=True, layer_idx=3
    )
    assert [seen[name].dtype for name in "qkvg"] == [torch.bfloat16] * 3 + [torch.float32]
    assert seen["q"].shape[2] == seen["k"].shape[2] == 6
    assert (output.dtype, state) == (torch.float32, None)
    assert error(output, chunk_gated_delta_rule(*case[:5], use_qk_l2norm_in_kernel=True)[0]) < 0.02


def test_why_its_port_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.port_is_usable()  # the port, triton-ascend or CANN is missing here
    module = ModuleType(host.PORT)
    module.__spec__ = importlib.machinery.ModuleSpec(host.PORT, None)
    monkeypatch.setitem(sys.modules, host.PORT, module)
    assert "triton-ascend is not installed" in host.port_is_usable()


def test_an_old_host_is_not_a_miss() -> None:
    """0.9.5 has no such function."""
    patch = next(one for one in host.PATCHES if one.id == "kernels.host_patch")
    assert patch.optional
