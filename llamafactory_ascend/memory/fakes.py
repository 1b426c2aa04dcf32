"""Tensors without storage: what is computed with them, and with the whole numbers that steer a model.

Weights and whatever comes of them are fake tensors of PyTorch, which know their shape and nothing else. Token
ids, positions, masks and grids are small and real, so that a model's code takes the turns it takes in a run:
whether there is padding, where packed samples begin, how many positions have a label.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves

from llamafactory_ascend.errors import AscendError

LARGEST_REAL = 1 << 24  # elements; a mask of 4,096 x 4,096 is real, larger ones are not
aten = torch.ops.aten


def new_mode() -> FakeTensorMode:
    """Return the mode in which a step is measured."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator below a fake mode, with real numbers where none of its arguments is fake."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return _fake(func, args, kwargs)
    if tensors and _largest(tensors) > LARGEST_REAL:
        return _fake(func, args, kwargs)
    if not tensors and not _makes_numbers(func, func(*args, **kwargs)):
        return func(*args, **kwargs)
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _fake(func: Any, args: Any, kwargs: Any) -> Any:
    if func is aten._local_scalar_dense.default and args[0].dtype.is_floating_point:
        return 0.0  # a number to be logged or compared with a limit; no shape depends on it
    if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
        args = (args[0], _as_places(args[1]), *args[2:])
    try:
        return func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise AscendError(
            f"the memory of this model depends on what it computes ({func}), which nobody knows before"
        ) from error


def _as_places(indices: list[Any]) -> list[Any]:
    """Return the indices of a tensor with the places that real masks choose, which are known."""
    found: list[Any] = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                found.extend(index.nonzero().unbind(1))
        else:
            found.append(index)
    return found


def _largest(tensors: list[Tensor]) -> int:
    try:
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))  # type: ignore[no-untyped-call]
        return int(shape.numel())
    except RuntimeError:
        return max(tensor.numel() for tensor in tensors)


def _makes_numbers(func: Any, result: Any) -> bool:
    """True where an operator without arguments makes whole numbers, or a range of which some may come."""
    if not isinstance(result, Tensor) or result.numel() > LARGEST_REAL:
        return False
    return not result.dtype.is_floating_point or func.overloadpacket in (aten.arange, aten.linspace)


@contextmanager
def without_storage(
    model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Let a model's parameters and buffers be fake tensors, wherever they are; they are put back.

    Args:
        dtype: of the parameters meanwhile; None: their own.
    """
    found: list[tuple[dict[str, Any], str, Any]] = []
    fakes: dict[int, Any] = {}
    for module in model.modules():
        for group in (module._parameters, module._buffers):
            for name, tensor in group.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:  # tied weights stay one
                    fakes[id(tensor)] = fake(tensor, mode, dtype)
                found.append((group, name, tensor))
    try:
        for group, name, tensor in found:
            group[name] = fakes[id(tensor)]
        yield
    finally:
        for group, name, tensor in found:
            group[name] = tensor


def fake(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Tensor:
    """Return a fake tensor in the place of a parameter or a buffer, on a CPU as far as PyTorch can tell."""
    is_parameter = isinstance(tensor, nn.Parameter)
    dtype = dtype if dtype and is_parameter and tensor.is_floating_point() else tensor.dtype
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    found: Tensor = FakeTensor(mode, empty, torch.device("cpu"))
    return nn.Parameter(found, tensor.requires_grad) if is_parameter else found
