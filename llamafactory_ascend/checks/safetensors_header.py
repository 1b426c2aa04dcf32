"""The header of a safetensors file: every tensor's type and shape without reading a tensor."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
BYTES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}


@dataclass(frozen=True)
class TensorInfo:
    """What the header says of a tensor: safetensors' name of the type (``BF16``) and the shape."""

    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return name -> type and shape, and make sure that the bytes the header promises are there.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a safetensors file, or it was cut off.
    """
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= size - 8:
            raise ValueError(f"{file} is not a safetensors file, or it was cut off in its header")
        try:
            header = json.loads(handle.read(length))
        except (ValueError, RecursionError):
            raise ValueError(f"{file} is not a safetensors file: its header is not JSON") from None
    try:
        found, end = _parse(header)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not a safetensors file: its header is none ({error!r})") from None
    if size != 8 + length + end:
        raise ValueError(f"{file} was cut off: {size:,} bytes, {8 + length + end:,} promised by its header")
    for name, (info, count) in found.items():
        if info.dtype in BYTES and count != BYTES[info.dtype] * math.prod(info.shape):
            raise ValueError(
                f"{file}: `{name}` has {count} bytes, its shape {info.shape} needs another number"
            )
    return {name: info for name, (info, _) in found.items()}


def _parse(header: Any) -> tuple[dict[str, tuple[TensorInfo, int]], int]:
    """Return name -> (what it says, bytes), and where the last tensor ends."""
    found, end = {}, 0
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = map(int, entry["data_offsets"])
            found[name] = TensorInfo(str(entry["dtype"]), tuple(map(int, entry["shape"]))), last - first
            end = max(end, last)
    return found, end


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Return the headers of every ``*.safetensors`` of a model folder as one, {} where there is none.

    Raises:
        OSError, ValueError: one of the files cannot be read.
    """
    merged: dict[str, TensorInfo] = {}
    for file in sorted(folder.glob("*.safetensors")):
        merged |= read_header(file)
    return merged
