"""The simulated NPU's settings, which hold for a process: each check runs in one of its own."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.own_process import run_check, start


# ---- several devices
def check_two_devices() -> None:
    assert torch.npu.device_count() == 2
    torch.npu.set_device(0)
    first = torch.ones(1000, device="npu")
    second = torch.ones(5000, device="npu:1")
    assert first.device.index == 0
    assert torch.npu.memory_allocated(0) == 4096
    assert torch.npu.memory_allocated(1) == (20000 + 32 + 511) // 512 * 512

    doubled = second * 2  # runs, and is charged, where its argument lives
    assert doubled.device.index == 1
    assert torch.npu.memory_stats(0)["requested_bytes.all.current"] == 4000
    assert torch.npu.memory_stats(1)["requested_bytes.all.current"] == 40000
    with pytest.raises(RuntimeError, match="found at least two devices, npu:0 and npu:1"):
        first + second[:1000]

    moved = first.to("npu:1")
    assert moved.tolist() == first.tolist()
    assert torch.npu.memory_stats(1)["requested_bytes.all.current"] == 44000
    with torch.npu.device(1):
        assert torch.empty(1, device="npu").device.index == 1
    with torch.npu.device_of(moved):
        assert torch.npu.current_device() == 1
    assert torch.npu.current_device() == 0

    torch.npu.reset_peak_memory_stats(0)
    del doubled
    assert torch.npu.max_memory_allocated(0) == torch.npu.memory_allocated(0)
    assert torch.npu.max_memory_allocated(1) > torch.npu.memory_allocated(1)
    torch.ops.simnpu.set_limit(1, 1 << 20)
    torch.empty(4 << 20, dtype=torch.uint8, device="npu:0")
    with pytest.raises(torch.OutOfMemoryError, match=r"NPU 1; 1\.00 MiB total capacity"):
        torch.empty(4 << 20, dtype=torch.uint8, device="npu:1")

    torch.npu.manual_seed_all(3)
    assert torch.equal(torch.rand(4, device="npu:0").cpu(), torch.rand(4, device="npu:1").cpu())


def test_two_devices_keep_separate_ledgers() -> None:
    run_check(check_two_devices, SIM_NPU_DEVICES="2")


def check_no_device() -> None:
    assert not torch.npu.is_available()
    with pytest.raises(RuntimeError, match="SIM_NPU_DEVICES is 0"):
        torch.ones(1, device="npu")


def test_no_device() -> None:
    run_check(check_no_device, SIM_NPU_DEVICES="0")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"SIM_NPU_DEVICES": "65"}, "SIM_NPU_DEVICES=65 is not between 0 and 64"),
        ({"SIM_NPU_DEVICES": "two"}, "SIM_NPU_DEVICES=two is not a whole number"),
    ],
)
def test_wrong_setting_is_named(setting: dict[str, str], message: str) -> None:
    done = start("-c", "import torch", **setting)
    assert done.returncode != 0
    assert message in done.stderr


def check_small_device() -> None:
    assert torch.npu.get_device_name() == "Ascend910_9362"
    assert torch.npu.mem_get_info()[1] == 3 << 20
    with pytest.raises(torch.OutOfMemoryError, match=r"3\.00 MiB total capacity"):
        torch.empty(4 << 20, dtype=torch.uint8, device="npu")


def test_memory_and_name_can_be_set() -> None:
    run_check(check_small_device, SIM_NPU_MEMORY_MB="3", SIM_NPU_NAME="Ascend910_9362")


# ---- what helps to find mistakes
def check_denied_operator() -> None:
    x = torch.ones(1, 2, 2, device="npu")
    for name, use in (
        ("aten::cumsum", lambda: x.cumsum(0)),
        ("aten::convolution", lambda: torch.nn.functional.conv1d(x, x.view(2, 2, 1))),
    ):
        with pytest.raises(NotImplementedError, match=f"Operator {name} is denied on the simulated NPU"):
            use()
    assert x.sum().item() == 4


def test_denied_operators_raise() -> None:
    run_check(check_denied_operator, SIM_NPU_DENY="aten::cumsum, aten::convolution")


def check_poison() -> None:
    assert torch.empty(4, device="npu").isnan().all()
    assert torch.empty_strided((2, 2), (1, 2), dtype=torch.bfloat16, device="npu").isnan().all()
    assert not torch.zeros(4, device="npu").isnan().any()


def test_poisoned_memory_is_nan() -> None:
    run_check(check_poison, SIM_NPU_POISON="1")


def check_late_copies() -> None:
    x = torch.ones(4, device="npu")
    pinned = torch.empty(4, pin_memory=True)
    event = torch.npu.Event()
    stream = torch.npu.current_stream()
    for wait in (torch.npu.synchronize, stream.synchronize, event.synchronize, event.query, x.sum().item):
        pinned.copy_(x, non_blocking=True)
        event.record()
        assert pinned.isnan().all()
        wait()
        assert pinned.tolist() == [1, 1, 1, 1]
    unpinned = torch.empty(4)
    unpinned.copy_(x, non_blocking=True)
    assert unpinned.tolist() == [1, 1, 1, 1]


def check_late_copies_to_the_device() -> None:
    here, side = torch.npu.current_stream(), torch.npu.Stream()
    pinned, event = torch.ones(4, pin_memory=True), torch.npu.Event()

    def begin() -> torch.Tensor:
        """A copy on the side stream, and an event after it."""
        x = torch.zeros(4, device="npu")
        side.wait_stream(here)
        with torch.npu.stream(side):
            x.copy_(pinned, non_blocking=True)
            event.record()
        return x

    # computed before the wait it is NaN, as what was there is undefined; after it, it is what was copied
    for wait in (
        partial(here.wait_event, event),
        partial(here.wait_stream, side),
        event.synchronize,
        event.query,
        side.synchronize,
        side.query,
        torch.npu.synchronize,
    ):
        x = begin()
        assert (x + 0).isnan().all(), wait
        wait()
        assert (x + 0).tolist() == [1] * 4, wait

    # waiting for something else is no help: another stream, an event before the copy, the current stream
    early = here.record_event()
    x = begin()
    torch.npu.Stream().synchronize()
    here.wait_event(early)
    early.synchronize()
    early_on_side = side.record_event()
    y = begin()
    here.wait_event(early_on_side)
    assert x.tolist() == [1] * 4 and y.isnan().all() and y[0].item() != 1 and y.cpu().isnan().all()
    side.synchronize()

    # what runs on the side stream comes after the copy, and so does a copy back from it, on the host as well
    x, back = begin(), torch.empty(4, pin_memory=True)
    with torch.npu.stream(side):
        assert (x + 1).tolist() == [2] * 4
        x = begin()
        back.copy_(x, non_blocking=True)
        y = torch.empty(4, device="npu")
        y.copy_(back, non_blocking=True)
    side.synchronize()
    assert back.tolist() == y.tolist() == [1] * 4

    # the source is read when the copy runs: it may not be written before
    x = begin()
    pinned.fill_(2)
    event.synchronize()
    assert x.tolist() == [2] * 4

    # on one stream nothing is late; other copies are blocking
    x = torch.zeros(4, device="npu")
    x.copy_(pinned, non_blocking=True)
    assert x.tolist() == [2] * 4
    with torch.npu.stream(side):
        blocking, unpinned, narrow = (torch.zeros(4, device="npu") for _ in range(3))
        blocking.copy_(pinned)
        unpinned.copy_(torch.ones(4), non_blocking=True)
        narrow.copy_(pinned.double().pin_memory(), non_blocking=True)
    assert (blocking.tolist(), unpinned.tolist(), narrow.tolist()) == ([2] * 4, [1] * 4, [2] * 4)

    # a copy holds no memory of the device, and none is written after it was freed
    del x, y
    before = torch.npu.memory_allocated()
    x = begin()
    x.untyped_storage().resize_(0)
    y = begin()
    del y
    assert torch.npu.memory_allocated() == before
    torch.npu.synchronize()
    assert x.untyped_storage().nbytes() == 0


def test_late_copies_show_a_missing_synchronisation() -> None:
    run_check(check_late_copies, SIM_NPU_ASYNC="1")


def test_late_copies_show_a_missing_wait_between_streams() -> None:
    run_check(check_late_copies_to_the_device, SIM_NPU_ASYNC="1")


def check_shared_random_stream() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(4), torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4, device="npu").cpu(), wanted[0])
    assert torch.equal(torch.rand(4), wanted[1])


def test_random_stream_can_be_the_cpus() -> None:
    run_check(check_shared_random_stream, SIM_NPU_SHARED_RNG="1")


def check_forked_child() -> None:
    torch.ones(1, device="npu")
    child = os.fork()
    if child == 0:
        try:
            torch.npu.set_device(0)
        except RuntimeError as error:
            os._exit(7 if "Cannot re-initialize NPU in forked subprocess" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.npu.is_initialized()


def test_forked_child_cannot_use_the_device() -> None:
    run_check(check_forked_child)


# ---- counts and the report
def check_use_for_report() -> None:
    import torch_npu

    x = torch.ones(2, 8, device="npu", requires_grad=True)  # 64 bytes
    y = torch_npu.npu_swiglu(x.to("npu")).sum()
    y.backward()
    y.item()
    x.detach().cpu()


def test_report_has_memory_and_counts(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    for rank in ("0", "1"):
        run_check(check_use_for_report, SIM_NPU_REPORT=str(report), SIM_NPU_TRACE="1", RANK=rank)
    run_check(check_nothing, SIM_NPU_REPORT=str(report), SIM_NPU_TRACE="1")
    first, second = map(json.loads, report.read_text().splitlines())
    assert (first["rank"], second["rank"]) == ("0", "1") and first["pid"] != second["pid"]
    assert first["stats"].keys() == {"0"}
    assert first["stats"]["0"]["requested_bytes.all.peak"] > 64
    assert first["ops"] == second["ops"]
    operators = {name: int(n) for name, n in first["ops"].items()}
    expected = ("npu::npu_swiglu", "npu::npu_swiglu_backward", "sync:item", "copy:d2h")
    assert {name: operators[name] for name in expected} == dict.fromkeys(expected, 1)
    assert "aten::silu" not in operators  # of which the fused operator is made


def check_nothing() -> None:
    assert torch.npu.is_available()


# ---- two ranks
if __name__ == "__main__":
    globals()[sys.argv[1]]()
