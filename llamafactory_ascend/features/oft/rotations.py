"""The rotations of many layers as one node of the graph, and what a layer does with its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamafactory_ascend.features.oft import cayley


class Rotations:
    """The rotations of several layers for one state of their weights.

    Attributes:
        exact: [blocks of all layers, b, b] in float32 (float64 for such weights); nobody writes to it.
        sizes: blocks of each layer.
    """

    def __init__(self, vectors: Sequence[Tensor]) -> None:
        self.sizes = [len(vector) for vector in vectors]
        with torch.inference_mode(False), torch.no_grad():  # an evaluation's result serves training too
            self.exact = cayley.cayley(torch.cat([vector.detach() for vector in vectors]))
            self._cast = {self.exact.dtype: self.exact}

    def parts(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return each layer's rotations in a dtype, cast once for all layers and calls."""
        with torch.inference_mode(False), torch.no_grad():
            if dtype not in self._cast:
                self._cast[dtype] = self.exact.to(dtype)
            return torch.split(self._cast[dtype], self.sizes)


class CayleyRotations(torch.autograd.Function):
    """Weights of several layers -> their rotations, with one backward for all.

    Nothing is saved through autograd: what backward needs is in the Rotations, which are kept anyway. So a
    checkpointed region in which this is called neither drops nor expects anything of it.
    """

    @staticmethod
    def forward(ctx: Any, rotations: Rotations, dtype: torch.dtype, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Return [blocks, b, b] in ``dtype`` for each of the ``vectors`` that ``rotations`` was made of."""
        ctx.rotations = rotations
        ctx.set_materialize_grads(False)
        return rotations.parts(dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        rotations: Rotations = ctx.rotations
        found: list[Tensor | None] = [None] * len(grads)
        # A tower without an image in the batch has no gradient, and its weights get none, as with PEFT.
        used = {i: g for i, g in enumerate(grads) if g is not None and ctx.needs_input_grad[i + 2]}
        if used:
            exact = rotations.exact
            if len(used) < len(grads):
                parts = torch.split(exact, rotations.sizes)
                exact = torch.cat([parts[i] for i in used])
            whole = cayley.gradient(exact, torch.cat(list(used.values())).to(exact.dtype))
            for i, part in zip(used, torch.split(whole, [rotations.sizes[i] for i in used]), strict=True):
                found[i] = part
        return (None, None, *found)


class Rotate(torch.autograd.Function):
    """x [..., blocks * b], rotation [blocks, b, b] of the same dtype -> x, each block times its rotation.

    Three products, each of which reads and writes the activations in their own layout: no copy in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Tensor) -> Tensor:
        ctx.save_for_backward(x, rotation)
        return _rotate(x, rotation)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, rotation = ctx.saved_tensors
        for_x = _rotate(grad, rotation.mT) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return for_x, None
        return for_x, torch.bmm(_by_block(x, rotation).mT, _by_block(grad, rotation))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.bmm(_by_block(x, rotation), rotation, out=_by_block(out, rotation))
    return out


def _by_block(x: Tensor, rotation: Tensor) -> Tensor:
    """Return [..., blocks * b] as [blocks, rows, b]."""
    blocks, width = rotation.shape[:2]
    return x.reshape(-1, blocks, width).transpose(0, 1)
