"""Numbers that steer a model are real, everything else has a shape only."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from llamafactory_ascend.memory import autocast, fakes, operators
from llamafactory_ascend.memory.ledger import Ledger


def test_labels_are_real_and_states_are_not() -> None:
    labels = torch.tensor([[3, -100, 5, -100]])
    with fakes.new_mode(), Ledger() as book:
        weight = torch.empty(1 << 20, 1 << 12, dtype=torch.bfloat16)
        states = weight[(labels[0] != -100).nonzero().squeeze(-1)]
        chosen = weight[:4][labels[0] > 0]  # a mask chooses as many rows as it has
        assert type(weight) is FakeTensor and states.shape == chosen.shape == (2, 1 << 12)
        assert torch.arange(5)[labels[0, 0]].item() == 3
        assert book.total > weight.nbytes == 8 << 30
        del weight
        assert book.total < 1 << 20


def test_autocast_raises_what_an_npu_raises() -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with autocast.autocast(torch.bfloat16):
        stock = x.softmax(-1).dtype, x.pow(2).dtype, x.sum().dtype
        with autocast.as_on_an_npu():
            raised = x.softmax(-1).dtype, x.pow(2).dtype, x.sum().dtype
            assert (x @ x.T).dtype == (x.float() @ x.T).dtype == torch.bfloat16
    assert stock == (torch.bfloat16,) * 3 and raised == (torch.float32,) * 3


def test_fused_operators_keep_what_those_of_an_npu_keep() -> None:
    from llamafactory_ascend.kernels.fused.norms import rms_norm

    with operators.in_place_of_torch_npu(), fakes.new_mode(), Ledger() as book:
        x = torch.empty(8, 1024, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(1024, dtype=torch.bfloat16)
        start = book.total
        y = rms_norm(x, weight, 1e-6)
        assert book.total - start == y.nbytes + 8 * 4  # the output, and 1 / rms of each row in float32
