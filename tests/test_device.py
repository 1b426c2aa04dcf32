"""Which device, and why; a broken torch_npu is said, it ends nothing."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llamafactory_ascend import device
from tests.sim_npu.available import unavailable_reason


@pytest.fixture
def npu() -> None:
    """The test needs the simulated NPU."""
    if reason := unavailable_reason():
        pytest.skip(reason)


def test_the_simulated_npu(npu: None) -> None:
    found = device.decide()
    assert (found.type, found.name, found.simulated) == ("npu", "Ascend910B3", True)
    assert found.reason == "the simulated NPU offers devices" and found.count == torch.npu.device_count()


def test_a_recipe_may_pass_the_npu_by(npu: None) -> None:
    found = device.decide("cpu")
    assert (found.type, found.count) == ("cpu", 1)
    assert found.reason == "the recipe chose it, past Ascend910B3 (the simulated NPU offers devices)"
    assert device.decide("npu") == device.decide()
    assert device.decide("xpu").reason.startswith("chosen by the host")


@pytest.mark.parametrize(
    "error", [ImportError("libhccl.so: cannot open"), RuntimeError("EL0003\nlong story")]
)
def test_a_broken_torch_npu_is_named(npu: None, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        raise error

    monkeypatch.setattr(torch.npu, "is_available", is_available)
    found = device.decide()
    assert found.type == "cpu"
    expected = (
        f"torch_npu 2.10.0 does not work: {type(error).__name__}: {str(error).splitlines()[0]}; no CUDA"
    )
    assert found.reason == expected


def test_an_npu_without_devices(npu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    assert device.decide().reason == "torch_npu 2.10.0 sees no device; no CUDA"


def test_torch_npu_that_was_never_loaded(tmp_path: Path) -> None:
    """A wheel without CANN: its package is there, and `import torch` has given it up."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so')")
    program = "from llamafactory_ascend import device; print(device.decide().reason)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            "PATH": "",
            "PYTHONPATH": f"{tmp_path}:{Path(__file__).parent.parent}",
            "LLAMAFACTORY_ASCEND": "0",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == (
        "torch_npu of unknown version is installed but was not loaded by `import torch`; no CUDA"
    )


@pytest.mark.parametrize(
    ("soc", "expected"),
    [
        ("Ascend910B3", True),
        ("Ascend910B4-1", True),
        ("Ascend910_9362", True),  # Atlas A3
        ("Ascend950DT", True),
        ("Ascend910A", False),
        ("Ascend910ProB", False),
        ("Ascend910PremiumA", False),
        ("Ascend910B", False),  # without a digit: first generation
        ("Ascend310P3", False),
    ],
)
def test_which_socs_compute_in_bfloat16(soc: str, expected: bool) -> None:
    assert device.supports_bfloat16(soc, driver_says=True) is expected
    assert device.supports_bfloat16(soc, driver_says=False) is False


def test_the_decision_knows_precision_memory_and_what_is_visible(
    npu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIM_NPU_NAME", "Ascend910A")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    found = device.decide()
    assert (found.name, found.bfloat16, found.visible) == ("Ascend910A", False, "3")
    assert found.memory == torch.npu.mem_get_info()[1]


@pytest.mark.parametrize(
    ("text", "ids"), [("0", [0]), ("1,2,3", [1, 2, 3]), ("1, 2", [1]), ("0-3", [0]), ("", []), ("all", [])]
)
def test_visible_ids_as_cann_reads_them(text: str, ids: list[int]) -> None:
    assert device.visible_ids(text) == ids


def test_count_visible(npu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "device_count", lambda: 8)
    assert device.count_visible({}) == device.count_visible({device.VISIBLE: ""}) == 8
    assert device.count_visible({device.VISIBLE: "2,5"}) == 2

    def device_count() -> int:
        raise RuntimeError("no CANN")

    monkeypatch.setattr(torch.npu, "device_count", device_count)
    assert device.count_visible({}) == 0


def test_bind_makes_the_ranks_own_card_the_current_one(npu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    monkeypatch.setattr(torch.npu, "device_count", lambda: 4)
    monkeypatch.setattr(torch.npu, "set_device", bound.append)
    assert device.bind({"LOCAL_RANK": "3"}) == "npu:3"
    assert device.bind({}) == device.bind({"LOCAL_RANK": "-1"}) == device.bind({"LOCAL_RANK": "4"}) == ""
    assert bound == [3]


def test_importing_asks_no_driver() -> None:
    program = "import sys; import llamafactory_ascend.device; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_memory_counts_bytes(npu: None) -> None:
    before = device.memory("npu")
    assert before is not None
    block = torch.empty(3 << 20, dtype=torch.uint8, device="npu")
    after = device.memory("npu")
    assert after is not None
    assert (
        0 <= after["allocated"] - before["allocated"] - block.nbytes <= 512
    )  # what the allocator rounds up to
    assert after["peak_allocated"] >= after["allocated"] and after["peak_reserved"] >= after["reserved"]


def test_a_cpu_keeps_no_account() -> None:
    assert device.memory("cpu") is None and device.memory("nonsense") is None


def test_a_dead_device_has_no_memory_to_report(npu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def memory_allocated(*_: Any) -> int:
        raise RuntimeError("device lost")

    monkeypatch.setattr(torch.npu, "memory_allocated", memory_allocated)
    assert device.memory("npu") is None
