"""Collectives and FSDP2 on ranks of the simulated NPU: each check runs on two of its own."""

import os
import sys

import pytest
import torch
import torch.distributed as dist

from tests.own_process import run_ranks


def join() -> tuple[int, str]:
    """This rank and its device, in a process group of two."""
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl")
    assert dist.get_backend() == "hccl" and torch.distributed.is_hccl_available()
    return rank, f"npu:{rank}"


def check_collectives() -> None:
    rank, device = join()
    mine = torch.full((2,), float(rank + 1), device=device)

    total = mine.clone()
    dist.all_reduce(total)
    assert total.tolist() == [3, 3]
    mean = mine.bfloat16()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.tolist() == [1.5, 1.5]
    root_mean = mine.clone()
    dist.reduce(root_mean, dst=0, op=dist.ReduceOp.AVG)
    assert root_mean.tolist() == ([1.5, 1.5] if rank == 0 else [2, 2])  # others keep their input
    received = mine.clone()
    dist.broadcast(received, src=1)
    assert received.tolist() == [2, 2]

    gathered = torch.zeros(4, device=device)
    dist.all_gather_into_tensor(gathered, mine)
    assert gathered.tolist() == [1, 1, 2, 2]
    gathered = torch.zeros(4, device=device)
    dist.all_gather_into_tensor(gathered, mine[None])  # a row of [1, 2] each: gloo alone refuses the shapes
    assert gathered.tolist() == [1, 1, 2, 2]
    parts = [torch.zeros(2, device=device) for _ in range(2)]
    dist.all_gather(parts, mine)
    assert [p.tolist() for p in parts] == [[1, 1], [2, 2]]
    scattered = torch.zeros(2, device=device)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device=device) + rank, op=dist.ReduceOp.AVG)
    assert scattered.tolist() == [2 * rank + 0.5, 2 * rank + 1.5]
    scattered = torch.zeros(1, 2, device=device)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device=device) + rank)
    assert scattered.tolist() == [[4.0 * rank + 1, 4.0 * rank + 3]]
    exchanged = torch.zeros(2, device=device)
    dist.all_to_all_single(exchanged, torch.tensor([10.0 * rank, 10.0 * rank + 1], device=device))
    assert exchanged.tolist() == [rank, 10 + rank]

    sending = dist.isend(mine.clone(), 1 - rank)  # the tensor is gone before gloo has sent it
    received = torch.zeros(2, device=device)
    dist.recv(received, 1 - rank)
    sending.wait()
    assert received.tolist() == [2 - rank, 2 - rank]
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]

    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()


def test_collectives() -> None:
    run_ranks(check_collectives)


def check_fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, device = join()
    mesh = init_device_mesh("npu", (2,))

    def build() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

    whole, sharded = build(), build().to(device)
    for part in (sharded[0], sharded[2], sharded):
        fully_shard(part, mesh=mesh)
    batch = torch.randn(6, 8)
    pairs = ((whole, batch), (sharded, batch[rank * 3 : rank * 3 + 3].to(device)))
    for model, rows in pairs:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(rows).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for shard, wanted in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert shard.device.type == "npu" and shard.to_local().numel() == wanted.numel() // 2
        torch.testing.assert_close(shard.full_tensor().cpu(), wanted, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


def test_fsdp2_trains_as_one_cpu() -> None:
    run_ranks(check_fsdp2)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
