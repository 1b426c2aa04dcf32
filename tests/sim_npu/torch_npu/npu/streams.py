"""``torch.npu.streams``: streams and events, on a device whose operators finish before they return."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from . import _get_device_index


class Stream(torch.Stream):
    """A stream of a device; with ``stream_id``, ``device_index`` and ``device_type``, an existing one."""

    def __new__(cls, device: Any = None, priority: int = 0, **existing: int) -> Stream:
        if existing:
            return super().__new__(cls, **existing)
        return super().__new__(cls, device=torch.device("npu", _get_device_index(device)), priority=priority)


class Event(torch.Event):
    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        return super().__new__(
            cls, device="npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def current_stream(device: Any = None) -> Stream:
    s = torch._C._accelerator_getStream(_get_device_index(device))
    return Stream(stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type)


def default_stream(device: Any = None) -> Stream:
    s = current_stream(device)
    return Stream(stream_id=0, device_index=s.device_index, device_type=s.device_type)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch._C._accelerator_setStream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one; nothing for None."""
    previous = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(previous)


StreamContext = stream
