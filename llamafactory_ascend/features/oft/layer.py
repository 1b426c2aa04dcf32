"""The forward of PEFT's OFT layer with rotations that are shared, and which layers it is for."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llamafactory_ascend.features.oft.rotations import Rotate

if TYPE_CHECKING:
    from llamafactory_ascend.features.oft.unit import Unit

UNIT = "ascend_unit"  # attribute of a layer: where its rotations come from


def is_linear(module: nn.Module) -> bool:
    """True for PEFT's OFT layer of a plain linear module; those of quantized ones are other classes."""
    from peft.tuners.oft.layer import Linear

    return isinstance(module, Linear)


def is_exact(rotation: nn.Module) -> bool:
    """True for a rotation that is an exact Cayley one, and nothing but that.

    PEFT keeps the series, one block shared by all (``block_share``), weights that are projected in every
    forward (``coft``), and what FSDP has wrapped by itself, whose weight is whole in its own forward only.
    """
    from peft.tuners.oft.layer import OFTRotationModule

    return type(rotation) is OFTRotationModule and not (
        rotation.use_cayley_neumann or rotation.block_share or rotation.coft
    )


def active_rotations(layer: Any) -> list[Any]:
    """Return the rotations that a layer's forward applies, in order."""
    if layer.disable_adapters or layer.merged:
        return []
    return [layer.oft_R[name] for name in layer.active_adapters if name in layer.oft_R]


def compute_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype in which a linear layer would use an input: autocast's, where that is on."""
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Rotate the input and call the base layer, as ``peft.tuners.oft.layer.Linear.forward`` does.

    PEFT casts the activations to the dtype of the OFT weights and back, two copies for each layer; here the
    rotations come in the dtype of the activations, computed in float32 and rounded once. With nothing to
    rotate, or with a rotation that is not ours, PEFT's own code runs.
    """
    rotations = active_rotations(self)
    if not rotations or not all(map(is_exact, rotations)):
        return type(self).forward(self, x, *args, **kwargs)  # type: ignore[no-any-return]
    unit: Unit = getattr(self, UNIT)
    dtype = compute_dtype(x.dtype, x.device.type)
    rotated = x.to(dtype)
    for rotation in rotations:
        rotated = Rotate.apply(rotated, unit.rotation(rotation, dtype))  # type: ignore[no-untyped-call]
    result: Tensor = self.base_layer(rotated, *args, **kwargs)
    return result.to(x.dtype)
