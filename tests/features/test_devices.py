"""One card for each rank, and no CPU in the place of an NPU."""

import pytest

from llamafactory_ascend.device import Device
from llamafactory_ascend.features.devices import (
    judge_launch,
    judge_presence,
    judge_ranks,
    judge_visible,
    launched_ranks,
    local_ranks,
)

NPU = Device("npu", "Ascend910B3", 8, False, "torch_npu 2.10.0 offers devices")
CUDA = Device("cuda", "H200", 1, False, "CUDA is there")
CPU = Device("cpu", "CPU", 1, False, "torch_npu 2.10.0 sees no device; no CUDA")


@pytest.mark.parametrize(
    ("setting", "installed", "found", "use_cpu"),
    [
        ("auto", True, NPU, False),
        ("auto", True, CPU, True),
        ("auto", True, CUDA, False),
        ("auto", False, CPU, False),
        ("auto", False, CUDA, False),
        ("npu", True, NPU, False),
        ("any", True, CPU, False),
    ],
)
def test_a_device_that_is_meant(setting: str, installed: bool, found: Device, use_cpu: bool) -> None:
    assert judge_presence(setting, installed, found, use_cpu) == []


@pytest.mark.parametrize(
    ("setting", "installed", "found", "use_cpu", "said"),
    [
        ("auto", True, CPU, False, "this would train on the CPU: torch_npu 2.10.0 sees no device"),
        ("npu", True, CPU, False, "there is no NPU to use: torch_npu 2.10.0 sees no device"),
        ("npu", False, CUDA, False, "there is no NPU to use: CUDA is there"),
        ("npu", True, NPU, True, "there is no NPU to use: `use_cpu: true`"),
    ],
)
def test_a_device_that_is_not(setting: str, installed: bool, found: Device, use_cpu: bool, said: str) -> None:
    (finding,) = judge_presence(setting, installed, found, use_cpu)
    assert finding.level == "error" and said in finding.message
    assert "`ascend: {device: any}`" in finding.message


def test_more_ranks_than_cards() -> None:
    (finding,) = judge_ranks(8, "NPROC_PER_NODE", 1, {"ASCEND_RT_VISIBLE_DEVICES": "3"})
    assert finding.message == (
        "NPROC_PER_NODE asks for 8 ranks on this node, but 1 NPU is visible (ASCEND_RT_VISIBLE_DEVICES=3); "
        "set NPROC_PER_NODE to 1, or name more in ASCEND_RT_VISIBLE_DEVICES"
    )
    (finding,) = judge_ranks(4, "LOCAL_WORLD_SIZE", 2, {})
    assert finding.message.endswith("but 2 NPUs are visible; set the number of processes to 2")
    assert judge_ranks(8, "NPROC_PER_NODE", 8, {}) == []


@pytest.mark.parametrize(
    ("visible", "environment", "levels"),
    [
        (1, {"NPROC_PER_NODE": "8", "FORCE_TORCHRUN": "1"}, ["error"]),
        (4, {"NPROC_PER_NODE": "8"}, ["error"]),
        (1, {"NPROC_PER_NODE": "8"}, ["warning"]),  # the host starts no torchrun, so nobody reads it
        (1, {"NPROC_PER_NODE": "1"}, []),
        (8, {"NPROC_PER_NODE": "4"}, []),
        (8, {}, []),
        (8, {"NPROC_PER_NODE": "abc"}, ["error"]),
        (8, {"NPROC_PER_NODE": ""}, ["error"]),
        (1, {"NPROC_PER_NODE": "0", "FORCE_TORCHRUN": "1"}, ["error"]),
        (1, {"NPROC_PER_NODE": "abc"}, []),
        (8, {"NPROC_PER_NODE": "auto"}, []),
        (0, {"NPROC_PER_NODE": "8"}, []),  # no NPU: judged as a device that is missing
    ],
)
def test_what_the_launcher_would_start(visible: int, environment: dict[str, str], levels: list[str]) -> None:
    assert [finding.level for finding in judge_launch(visible, environment)] == levels


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 8),
        ({"NPROC_PER_NODE": "4"}, 4),
        ({"NPROC_PER_NODE": "auto", "NNODES": "2"}, 16),
        ({"NPROC_PER_NODE": "4", "NNODES": "2", "RANK": "0", "WORLD_SIZE": "1"}, 8),
        ({"MAX_NNODES": "3"}, 8),
        ({"MAX_NNODES": "3", "MIN_NNODES": "1", "RDZV_ID": "a"}, 24),
    ],
)
def test_how_many_ranks_the_launcher_would_start(environment: dict[str, str], ranks: int) -> None:
    assert launched_ranks(8, environment) == ranks


def test_variables_of_torchrun_that_are_no_numbers() -> None:
    """A shell that exports them empty: stock's Trainer does not read LOCAL_WORLD_SIZE."""
    for text in ("", "abc", "²"):
        assert local_ranks({"LOCAL_WORLD_SIZE": text}) == 1
    assert (local_ranks({"LOCAL_WORLD_SIZE": "8"}), local_ranks({})) == (8, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [("0, 1", "up to what is no digit or comma: [0]"), ("1,0", "ascending"), ("0,0", "ascending")],
)
def test_a_list_that_is_read_otherwise_than_meant(text: str, said: str) -> None:
    (finding,) = judge_visible({"ASCEND_RT_VISIBLE_DEVICES": text})
    assert finding.level == "warning" and said in finding.message
    assert judge_visible({"ASCEND_RT_VISIBLE_DEVICES": "0,3,7"}) == judge_visible({}) == []
