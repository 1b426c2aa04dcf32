"""What HCCL and torch_npu are told, and which values of the user's are refused, from the mapping alone."""

import re
import sys
from types import ModuleType

import pytest

from llamafactory_ascend import device
from llamafactory_ascend.features import environment
from llamafactory_ascend.features.environment import defaults, judge, least_ddp_timeout


def test_defaults_are_legal_everywhere() -> None:
    found = defaults({})
    assert found == {
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "7200",
    }
    assert judge(found) == []
    assert int(found["HCCL_EXEC_TIMEOUT"]) <= 17340  # the most on the first generation of training chips


@pytest.mark.parametrize("taken", [{"HCCL_EVENT_TIMEOUT": "1868"}, {"HCCL_OP_EXPANSION_MODE": "AIV"}])
def test_a_wait_that_hangs_on_another_variable_is_left_to_hccl(taken: dict[str, str]) -> None:
    assert "HCCL_EXEC_TIMEOUT" not in defaults(taken)
    assert all(finding.level != "error" for finding in judge({**defaults(taken), **taken}))


@pytest.mark.parametrize(
    ("variables", "level", "said"),
    [
        ({"HCCL_CONNECT_TIMEOUT": "119"}, "error", "HCCL takes whole seconds from 120 to 7200"),
        ({"HCCL_CONNECT_TIMEOUT": "7201"}, "error", "HCCL takes whole seconds from 120 to 7200"),
        ({"HCCL_CONNECT_TIMEOUT": "10m"}, "error", "HCCL_CONNECT_TIMEOUT=10m"),
        ({"HCCL_CONNECT_TIMEOUT": "²"}, "error", "HCCL_CONNECT_TIMEOUT=²"),
        ({"HCCL_CONNECT_TIMEOUT": "200"}, "note", "below the 300 s that torch_npu advises"),
        ({"HCCL_EXEC_TIMEOUT": "-1"}, "error", "from 0 (for ever) to 2147483647"),
        ({"HCCL_EXEC_TIMEOUT": "long"}, "error", "HCCL_EXEC_TIMEOUT=long"),
        ({"HCCL_EXEC_TIMEOUT": "1868", "HCCL_EVENT_TIMEOUT": "1868"}, "warning", "must be longer than"),
        ({"HCCL_EVENT_TIMEOUT": "1800"}, "warning", "(HCCL_EXEC_TIMEOUT: 1836 s)"),
        (
            {"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_EXEC_TIMEOUT": "7200"},
            "error",
            "cannot be kept with HCCL_OP_EXPANSION_MODE=AIV, which waits 1091 s",
        ),
        ({"HCCL_OP_EXPANSION_MODE": "aiv", "HCCL_EXEC_TIMEOUT": "0"}, "error", "cannot be kept"),
        ({"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_EXEC_TIMEOUT": "1091"}, "warning", "made for inference"),
        ({"HCCL_OP_TIMEOUT": "3600"}, "warning", "is HCCL_EXEC_TIMEOUT (1836 s)"),
        (
            {"HCCL_OP_TIMEOUT": "3600", "HCCL_EXEC_TIMEOUT": "7200"},
            "warning",
            "neither HCCL nor torch_npu has such a variable",
        ),
    ],
)
def test_what_is_said_of_a_users_values(variables: dict[str, str], level: str, said: str) -> None:
    (finding,) = judge(variables)
    assert finding.level == level
    assert re.search(re.escape(said), finding.message), finding.message


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"HCCL_CONNECT_TIMEOUT": "600"},
        {"HCCL_EXEC_TIMEOUT": "0"},
        {"HCCL_EXEC_TIMEOUT": "0.05"},
        {"HCCL_EXEC_TIMEOUT": "1800", "HCCL_EVENT_TIMEOUT": "1868"},
        {"HCCL_EVENT_TIMEOUT": "0"},
        {"HCCL_OP_EXPANSION_MODE": "HOST", "HCCL_EXEC_TIMEOUT": "7200"},
        {"TASK_QUEUE_ENABLE": "2"},
    ],
)
def test_good_values_pass_without_a_word(good: dict[str, str]) -> None:
    assert judge(good) == []


def test_task_queue_and_fla_npu() -> None:
    (finding,) = judge({"TASK_QUEUE_ENABLE": "2"}, fla_npu=True)
    assert finding.level == "error" and "fla_npu" in finding.message
    assert judge({"TASK_QUEUE_ENABLE": "1"}, fla_npu=True) == []


def test_transfer_to_npu_is_seen_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.loaded() == {"fla_npu": False, "transfer": False}
    assert environment.TRANSFER not in sys.modules
    monkeypatch.setitem(sys.modules, environment.TRANSFER, ModuleType(environment.TRANSFER))
    (finding,) = judge({}, **environment.loaded())
    assert finding.level == "error" and finding.message.startswith(
        "torch_npu.contrib.transfer_to_npu is loaded"
    )


@pytest.mark.parametrize(
    ("variables", "least"),
    [
        ({}, 1896),
        ({"HCCL_EXEC_TIMEOUT": "7200"}, 7260),
        ({"HCCL_EXEC_TIMEOUT": "0"}, 180000000),
        ({"HCCL_OP_EXPANSION_MODE": "AIV"}, 1151),
    ],
)
def test_the_process_group_outlasts_hccl(variables: dict[str, str], least: int) -> None:
    assert least_ddp_timeout(variables) == least


def test_nothing_is_set_without_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("sim_npu")])
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert not device.is_installed()
    assert environment.ascend_environment("train") == {}
