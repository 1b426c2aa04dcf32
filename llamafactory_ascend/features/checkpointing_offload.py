"""`checkpointing: offload`: the inputs of checkpointed layers wait for backward in pinned host memory.

Checkpointing saves one hidden state per layer, which is what is left of a long context on the device. All
copies run on one stream beside the computation, so that a buffer which is read back and written again needs
no other order than theirs. A copy to the host waits for the layer before; the copy back is begun one layer
ahead, and the computation waits for it alone.

Pinned memory is made in the thread that runs forward, never in another: see ``data_loading`` on NPUs.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from llamafactory_ascend.errors import AscendError


class HostInputs:
    """Moves the hidden states that checkpoints save, and keeps the pinned buffers from step to step.

    Attributes:
        moved: hidden states moved to the host since it was set to 0.
        pinned: bytes of pinned memory in use or at hand.
    """

    def __init__(self) -> None:
        self.moved = self.pinned = 0
        self.buffers: list[torch.Tensor] = []  # at hand, each uint8
        self.stream: Any = None
        self.last: weakref.ref[Parked] | None = None

    @contextmanager
    def saving(self, args: tuple[Any, ...]) -> Iterator[None]:
        """Move the first floating-point tensor among a layer's arguments, where its checkpoint saves it."""
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
        if not tensors:
            yield
            return
        pack = partial(self._pack, tensors[0].data_ptr())
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def _pack(self, address: int, tensor: torch.Tensor) -> "torch.Tensor | Parked":
        if tensor.data_ptr() != address or tensor.device.type == "cpu" or not tensor.is_contiguous():
            return tensor
        if self.stream is None:
            self.stream = torch.get_device_module(tensor.device).Stream()
        self.moved += 1
        parked = Parked(self, tensor)
        self.last = weakref.ref(parked)
        return parked

    def take(self, size: int) -> torch.Tensor:
        """Return a pinned buffer of at least this many bytes.

        Raises:
            AscendError: the host cannot pin as much.
        """
        buffer = self.buffers.pop() if self.buffers else None
        if buffer is not None and buffer.nbytes >= size:
            return buffer
        self.pinned += size - (buffer.nbytes if buffer is not None else 0)
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise AscendError(
                f"`ascend.checkpointing: offload`: the host cannot pin {self.pinned:,} bytes for this rank: "
                f"{str(error).splitlines()[0]}",
                "lower `cutoff_len` or `per_device_train_batch_size`, or write `ascend.checkpointing: full`",
            ) from error


class Parked:
    """A hidden state on the host. Its buffer goes back when autograd lets go of it."""

    def __init__(self, owner: HostInputs, tensor: torch.Tensor) -> None:
        self.owner, self.before = owner, owner.last
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.buffer = owner.take(tensor.nbytes)
        self.arriving: torch.Tensor | None = None
        self.event: Any = None
        module = torch.get_device_module(self.device)
        owner.stream.wait_stream(module.current_stream())
        with module.stream(owner.stream):
            self.host().copy_(tensor, non_blocking=True)
        tensor.record_stream(owner.stream)

    def host(self) -> torch.Tensor:
        size = self.shape.numel() * self.dtype.itemsize
        return self.buffer[:size].view(self.dtype).view(self.shape)

    def fetch(self) -> None:
        """Begin to copy it back."""
        module, stream = torch.get_device_module(self.device), self.owner.stream
        arriving = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        stream.wait_stream(module.current_stream())  # which may still use what was in this memory
        with module.stream(stream):
            arriving.copy_(self.host(), non_blocking=True)
            self.event = stream.record_event()
        arriving.record_stream(stream)
        self.arriving = arriving

    def take_back(self) -> torch.Tensor:
        """Return it on the device, and begin to fetch the one before."""
        if self.arriving is None:
            self.fetch()
        found, self.arriving = self.arriving, None
        assert found is not None
        torch.get_device_module(self.device).current_stream().wait_event(self.event)
        before = self.before() if self.before is not None else None
        if before is not None and before.arriving is None:
            before.fetch()
        return found

    def __del__(self) -> None:
        if hasattr(self, "buffer"):
            self.owner.buffers.append(self.buffer)


def _unpack(saved: "torch.Tensor | Parked") -> torch.Tensor:
    return saved.take_back() if isinstance(saved, Parked) else saved
