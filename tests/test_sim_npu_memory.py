"""The simulated NPU's ledger: what is charged, when it is given back, and what running out looks like."""

import gc
import re
from collections.abc import Iterator

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

MiB = 1 << 20


def block(size: int) -> int:
    """The allocator's block for a request of ``size`` bytes."""
    return (size + 32 + 511) // 512 * 512


@pytest.fixture(autouse=True)
def settled_ledger() -> Iterator[None]:
    gc.collect()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    yield


@pytest.fixture
def capacity() -> Iterator[int]:
    """The device's capacity, restored with the whole of it usable."""
    total = torch.npu.mem_get_info()[1]
    yield total
    torch.ops.simnpu.set_limit(0, total)
    torch.npu.set_per_process_memory_fraction(1.0)


def test_allocations_results_and_views_are_charged_once() -> None:
    base = torch.npu.memory_allocated()
    a = torch.empty(1000, 1000, device="npu")
    assert torch.npu.memory_allocated() - base == block(4_000_000)
    b = a @ a  # the CPU's kernel allocated this
    assert torch.npu.memory_allocated() - base == 2 * block(4_000_000)
    view = b[10:]
    assert torch.npu.memory_allocated() - base == 2 * block(4_000_000)
    del a, b
    assert torch.npu.memory_allocated() - base == block(4_000_000)
    del view
    assert torch.npu.memory_allocated() == base
    assert torch.npu.max_memory_allocated() - base == 2 * block(4_000_000)


def test_statistics_agree_with_each_other_and_with_torch_accelerator() -> None:
    before = torch.npu.memory_stats()
    kept = [torch.empty(n, dtype=torch.uint8, device="npu") for n in (1, 480, 481, 3 * MiB)]
    after = torch.npu.memory_stats()

    def grown(name: str) -> int:
        return after[name] - before[name]

    assert grown("requested_bytes.all.current") == 1 + 480 + 481 + 3 * MiB
    assert grown("allocated_bytes.all.current") == 512 + 512 + 1024 + 3 * MiB + 512
    assert grown("num_device_alloc") == len(kept)
    assert torch.npu.memory_reserved() % (2 * MiB) == 0
    assert torch.npu.memory_reserved() >= torch.npu.memory_allocated()
    assert torch.npu.mem_get_info()[0] == torch.npu.mem_get_info()[1] - torch.npu.memory_reserved()
    assert torch.accelerator.memory_allocated() == torch.npu.memory_allocated()
    assert torch.accelerator.max_memory_reserved() == torch.npu.max_memory_reserved()
    assert f"requested_bytes.all.peak: {after['requested_bytes.all.peak']}" in torch.npu.memory_summary()


def test_reserved_memory_outlives_the_tensors_until_the_cache_is_emptied() -> None:
    base = torch.npu.memory_reserved()
    large = torch.empty(64 * MiB, dtype=torch.uint8, device="npu")
    reserved = torch.npu.memory_reserved()
    del large
    assert reserved - base >= 64 * MiB
    assert torch.npu.memory_reserved() == reserved
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == base
    assert torch.npu.max_memory_reserved() == reserved
    torch.npu.reset_peak_memory_stats()
    assert torch.npu.max_memory_reserved() == base


def test_accumulated_counts_are_reset() -> None:
    torch.ones(3, device="npu")
    assert torch.npu.memory_stats()["num_device_alloc"] > 0
    torch.npu.reset_accumulated_memory_stats()
    assert torch.npu.memory_stats()["num_device_alloc"] == 0


def test_training_step_equals_memtracker_to_the_byte() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to("npu")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randn(128, 64, device="npu")
    gc.collect()
    base = torch.npu.memory_stats()["requested_bytes.all.current"]
    known = sum(t.nbytes for t in (*model.parameters(), x))
    torch.npu.reset_peak_memory_stats()
    tracker = MemTracker()
    tracker.track_external(model, optimizer, x)
    with tracker:
        model(x).square().mean().backward()
        optimizer.step()
    tracked = tracker.get_tracker_snapshot("peak")[torch.device("npu:0")]["Total"]
    assert torch.npu.memory_stats()["requested_bytes.all.peak"] - base + known == tracked


def test_checkpointing_lowers_the_peak() -> None:
    def train(recompute: bool) -> tuple[int, torch.Tensor]:
        torch.manual_seed(0)
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to("npu")
            for _ in range(6)
        ]
        x = torch.randn(512, 64, device="npu", requires_grad=True)
        torch.npu.reset_peak_memory_stats()
        base = torch.npu.memory_allocated()
        h = x
        for b in blocks:
            h = checkpoint(b, h, use_reentrant=False) if recompute else b(h)
        h.sum().backward()
        return torch.npu.max_memory_allocated() - base, x.grad.cpu()

    kept, gradient = train(recompute=False)
    recomputed, same_gradient = train(recompute=True)
    assert torch.equal(gradient, same_gradient)
    assert kept > 6 * 2 * 512 * 256 * 4  # both 512 x 256 activations of each block, float32
    assert recomputed < kept / 2


def test_attention_holds_no_matrix_of_scores() -> None:
    q = torch.randn(1, 2, 1024, 16, device="npu")
    torch.npu.reset_peak_memory_stats()
    base = torch.npu.memory_allocated()
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.npu.max_memory_allocated() - base < 2 * 1024 * 1024 * 4


def test_histc_charges_its_result() -> None:
    counted = torch.zeros(1000, dtype=torch.int64, device="npu")
    base = torch.npu.memory_allocated()
    histogram = torch.histc(counted, bins=100, min=0, max=99)
    assert torch.npu.memory_allocated() - base == block(100 * 8)
    assert histogram[0].item() == 1000


def test_out_of_memory_names_the_sizes_and_charges_nothing(capacity: int) -> None:
    torch.ops.simnpu.set_limit(0, 64 * MiB)
    before = torch.npu.memory_stats()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(128 * MiB, dtype=torch.uint8, device="npu")
    numbers = re.fullmatch(
        r"NPU out of memory\. Tried to allocate 128\.00 MiB \(NPU 0; 64\.00 MiB total capacity; "
        r"(?P<allocated>\S+ \w+) already allocated; (?P=allocated) current active; \S+ \w+ free; "
        r"\S+ \w+ reserved in total by PyTorch\) \[simulated NPU\]",
        str(caught.value).splitlines()[0],
    )
    assert numbers, str(caught.value)
    after = torch.npu.memory_stats()
    assert after["num_ooms"] == before["num_ooms"] + 1
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    torch.empty(32 * MiB, dtype=torch.uint8, device="npu")


def test_result_of_a_cpu_kernel_may_not_exceed_the_capacity(capacity: int) -> None:
    a = torch.ones(1024, 1, device="npu")
    torch.ops.simnpu.set_limit(0, torch.npu.memory_allocated() + 2 * MiB)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4\.00 MiB"):
        a @ a.T


def test_memory_fraction_is_of_the_capacity_not_of_the_last_fraction(capacity: int) -> None:
    torch.ops.simnpu.set_limit(0, 64 * MiB)
    torch.npu.set_per_process_memory_fraction(0.5)
    torch.npu.set_per_process_memory_fraction(0.5)
    torch.empty(24 * MiB, dtype=torch.uint8, device="npu")
    assert torch.npu.mem_get_info()[1] == 64 * MiB
    with pytest.raises(torch.OutOfMemoryError, match=r"may use 0\.5"):
        torch.empty(40 * MiB, dtype=torch.uint8, device="npu")
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        torch.npu.set_per_process_memory_fraction(1.5)


def test_free_memory_is_never_negative(capacity: int) -> None:
    torch.npu.empty_cache()
    torch.ops.simnpu.set_limit(0, torch.npu.memory_allocated() + MiB)
    kept = torch.empty(MiB // 2, dtype=torch.uint8, device="npu")  # its 2 MiB segment exceeds the capacity
    assert torch.npu.mem_get_info()[0] == 0 == torch.accelerator.get_memory_info()[0]
    del kept


def test_emptied_storage_stays_on_the_device_and_can_be_refilled() -> None:
    t = torch.zeros(3, device="npu")
    base = torch.npu.memory_allocated()
    t.untyped_storage().resize_(0)
    assert torch.npu.memory_allocated() == base - block(12)
    assert t.untyped_storage().device.type == "npu"
    t.untyped_storage().resize_(12)
    assert torch.npu.memory_allocated() == base
    assert t.fill_(2).tolist() == [2, 2, 2]


def test_output_that_an_operator_resized_is_followed() -> None:
    base = torch.npu.memory_allocated()
    out = torch.empty(0, device="npu")
    returned = torch.mul(torch.arange(12.0, device="npu"), 2, out=out)
    assert returned is out
    assert out.tolist() == [2.0 * i for i in range(12)]
    assert torch.npu.memory_allocated() - base == block(12 * 4)


def test_pinned_memory_is_host_memory_and_is_recognised() -> None:
    base = torch.npu.memory_allocated()
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned() and pinned[2:].is_pinned() and not torch.ones(4).is_pinned()
    assert pinned.device.type == "cpu" and torch.npu.memory_allocated() == base
    assert pinned.to("npu", non_blocking=True).sum().item() == 4


@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor:DeprecationWarning")
def test_data_loader_pins_batches() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(8.0).unsqueeze(1), batch_size=4, pin_memory=True)
    assert [batch.is_pinned() for batch in loader] == [True, True]
