"""The simulated NPU as a PyTorch device: recognised, strict, with views, streams and random numbers."""

import io
from pathlib import Path

import pytest
import torch
import torch_npu
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint


def test_libraries_see_an_npu() -> None:
    from accelerate.utils import is_npu_available
    from transformers.utils import is_torch_npu_available

    assert torch_npu.IS_SIMULATED
    assert is_torch_npu_available(check_device=True)
    assert is_npu_available(check_device=True)
    assert torch.accelerator.current_accelerator().type == "npu"
    assert torch.npu.get_device_name() == "Ascend910B3"
    assert torch.npu.get_device_properties(0).total_memory == torch.npu.mem_get_info()[1]
    t = torch.ones(2).npu()
    assert t.is_npu and not t.is_cpu and t.device == torch.device("npu:0")


def test_missing_name_says_that_the_npu_is_simulated() -> None:
    assert not hasattr(torch.npu, "no_such_name")
    with pytest.raises(AttributeError, match=r"'torch\.npu' has no attribute .* \(simulated NPU\)"):
        _ = torch.npu.no_such_name


def test_unknown_device_index_is_refused() -> None:
    for use in (torch.npu.set_device, torch.npu.memory_allocated, torch.ones(1).npu):
        with pytest.raises(RuntimeError, match=r"Invalid NPU device index 7.*SIM_NPU_DEVICES is 1"):
            use(7)
    with pytest.raises(ValueError, match="Expected a npu device, but got: cpu"):
        torch.npu.set_device("cpu")


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, cpu: x + cpu,
        lambda x, cpu: torch.nn.functional.linear(x, cpu.expand(3, 3)),
        lambda x, cpu: torch.nn.functional.conv1d(x.view(1, 1, 3), cpu.view(1, 1, 3)),
        lambda x, cpu: torch.cat([x, cpu]),
        lambda x, cpu: torch.histc(cpu, 3, 0, 2, out=x),
    ],
    ids=["add", "linear", "conv1d", "cat", "histc"],
)
def test_mixed_devices_are_refused(mix) -> None:
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, npu:0 and cpu"):
        mix(torch.ones(3, device="npu"), torch.ones(3))


def test_cpu_scalars_and_cpu_indices_may_join() -> None:
    x = torch.arange(3.0, device="npu")
    assert (x + torch.tensor(1.0)).tolist() == [1, 2, 3]
    picked = x[torch.tensor([0, 2])]
    assert picked.device.type == "npu" and picked.tolist() == [0, 2]


def test_numpy_is_refused() -> None:
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        torch.ones(3, device="npu").numpy()


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(RuntimeError, match="strided tensors only"):
        torch.eye(3, device="npu").to_sparse()


def test_views_share_memory() -> None:
    t = torch.arange(12, device="npu")
    t.view(3, 4)[1].add_(100)
    assert t.tolist() == [0, 1, 2, 3, 104, 105, 106, 107, 8, 9, 10, 11]
    pairs = torch.zeros(2, 2, device="npu")
    torch.view_as_complex(pairs).add_(1 + 2j)
    assert pairs.tolist() == [[1, 2], [1, 2]]
    low, high = torch.arange(6.0, device="npu").chunk(2)
    low += high
    assert low.tolist() == [3, 5, 7]


def test_outputs_are_matched_to_their_arguments() -> None:
    x = torch.tensor([3.0, 1.0, 2.0], device="npu")
    values, indices = torch.empty(3, device="npu"), torch.empty(3, dtype=torch.int64, device="npu")
    returned = torch.sort(x, out=(values, indices))
    assert returned[0] is values and returned[1] is indices
    assert values.tolist() == [1, 2, 3] and indices.tolist() == [1, 2, 0]


def test_module_to_keeps_parameters_and_ties() -> None:
    a, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    b.weight = a.weight
    weight = a.weight
    both = torch.nn.ModuleList([a, b])
    both.to("npu")
    assert a.weight is b.weight is weight and weight.is_npu
    both.cpu()
    assert a.weight is b.weight is weight and weight.is_cpu
    a(torch.ones(1, 4)).sum().backward()
    assert weight.grad.is_cpu


def test_storage_references_are_counted() -> None:
    t = torch.ones(3, device="npu")
    storage = t.untyped_storage()
    before = torch_npu._C._storage_Use_Count(storage._cdata)
    view = t[1:]
    assert torch_npu._C._storage_Use_Count(storage._cdata) == before + 1
    del view
    t.add(1)  # the CPU's view of the storage ends with the operator
    assert torch_npu._C._storage_Use_Count(storage._cdata) == before


def test_random_stream_is_the_devices_own() -> None:
    torch.npu.manual_seed(7)
    first = torch.randn(5, device="npu")
    state = torch.npu.get_rng_state()
    second = torch.randn(5, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(second, torch.randn(5, device="npu")) and not torch.equal(first, second)
    assert len(torch.npu.random.get_rng_state_all()) == torch.npu.device_count()

    torch.manual_seed(1)
    wanted = torch.randn(4)
    torch.manual_seed(1)
    torch.randn(3, device="npu")
    torch.nn.functional.dropout(torch.ones(9, device="npu"), 0.5)
    assert torch.equal(wanted, torch.randn(4))


def test_torch_manual_seed_seeds_the_device() -> None:
    torch.manual_seed(11)
    first = torch.randn(5, device="npu")
    torch.manual_seed(11)
    assert torch.equal(first, torch.randn(5, device="npu"))
    assert torch.npu.initial_seed() == 11
    generator = torch.Generator(device="npu").manual_seed(11)
    assert torch.equal(first, torch.randn(5, device="npu", generator=generator))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_repeats_dropout(use_reentrant: bool) -> None:
    x = torch.ones(256, device="npu", requires_grad=True)
    y = checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5).square(), x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)  # the recomputed mask is the mask of the forward pass


def test_torch_save_and_load() -> None:
    file = io.BytesIO()
    torch.save(torch.arange(3.0, device="npu"), file)
    for device in ("npu", "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=device, weights_only=True)
        assert loaded.device.type == device and loaded.tolist() == [0, 1, 2]


def test_safetensors(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0, device="npu")}, tmp_path / "a.safetensors")
    loaded = load_file(tmp_path / "a.safetensors", device="npu:0")["w"]
    assert loaded.device == torch.device("npu:0") and loaded.tolist() == [0, 1, 2, 3, 4, 5]


def test_autocast_lowers_and_raises() -> None:
    linear, x = torch.nn.Linear(8, 8).to("npu"), torch.randn(2, 8, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        y = linear(x)
        assert torch.npu.is_autocast_enabled() and torch.npu.get_autocast_dtype() == torch.bfloat16
        assert y.dtype == torch.bfloat16
        assert torch.softmax(y, -1).dtype == torch.float32
        assert torch.cat([y, x]).dtype == torch.float32
    with torch.npu.amp.autocast():
        assert linear(x).dtype == torch.float16
    assert linear(x).dtype == torch.float32


def test_grad_scaler_skips_a_step_with_infinities() -> None:
    linear = torch.nn.Linear(8, 8).to("npu")
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1, fused=True)
    scaler = torch.npu.amp.GradScaler()
    assert scaler.get_scale() == 2.0**16
    for scale, moves in ((1.0, True), (float("inf"), False)):
        before = linear.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(linear(torch.ones(2, 8, device="npu")).sum() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, linear.weight) is not moves
    assert scaler.get_scale() == 2.0**15


def test_streams_and_events() -> None:
    side = torch.npu.Stream()
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side != torch.npu.default_stream()
        start.record()
        end.record()
    assert torch.npu.current_stream() == torch.npu.default_stream()
    end.synchronize()
    assert end.query() and start.elapsed_time(end) >= 0
    side.wait_stream(torch.npu.current_stream())
    torch.ones(2, device="npu").record_stream(side)
    with torch.npu.stream(None):
        assert torch.npu.current_stream() == torch.npu.default_stream()
