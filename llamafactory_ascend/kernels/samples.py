"""The packed call for the probe: a stretch of one row with samples in it, the old code sample by sample."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from llamafactory_ascend.kernels import varlen
from llamafactory_ascend.kernels.varlen import Sequences

Call = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
STRETCH = 1024  # tokens at most
SAMPLES = 8  # at most: the old code computes one after the other, each in many launches


@dataclass(frozen=True)
class Samples:
    """How a call on packed samples is taken apart.

    Attributes:
        sequences: (args, kwargs) -> those of the call, None where its rows are whole samples.
        tokens: (args, kwargs) -> tokens in a row.
        stretch: (args, kwargs, row, first, last) -> a call on these tokens of a row, as if they were alone.
        axis: of the output, along its tokens.
    """

    sequences: Callable[[tuple[Any, ...], dict[str, Any]], Sequences | None]
    tokens: Callable[[tuple[Any, ...], dict[str, Any]], int]
    stretch: Callable[[tuple[Any, ...], dict[str, Any], int, int, int], Arguments]
    axis: int


def pack(
    form: Samples,
    old: Call,
    new: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Sequences | None,
) -> tuple[Call, Call, tuple[Any, ...], dict[str, Any]] | None:
    """Return old code, new code and arguments of a packed call to be compared.

    Args:
        old: computes whole rows; here it is called once for each sample and its outputs are joined.
        new: asks `varlen.current()` for the samples.
        found: the sequences of the call; without any, the row is cut in two, as if it held two samples.

    Returns:
        None where a row has one token, which nothing can share with it.
    """
    tokens = form.tokens(args, kwargs)
    if tokens < 2:
        return None
    row, first, bounds = stretch(None if found is None else found.cu_seqlens.tolist(), tokens)
    short = form.stretch(args, kwargs, row, first, first + bounds[-1])
    device = next(x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    sequences = varlen.of_cu_seqlens(torch.tensor(bounds, device=device), bounds[-1])

    def one_by_one(*args: Any, **kwargs: Any) -> Any:
        calls = [form.stretch(args, kwargs, 0, start, end) for start, end in pairwise(bounds)]
        results = [old(*some, **named) for some, named in calls]
        if isinstance(results[0], Tensor):
            return torch.cat(results, form.axis)
        return torch.cat([result[0] for result in results], form.axis), *results[-1][1:]

    def together(*args: Any, **kwargs: Any) -> Any:
        with varlen.using(sequences):
            return new(*args, **kwargs)

    return one_by_one, together, *short


def stretch(cu_seqlens: list[int] | None, tokens: int) -> tuple[int, int, list[int]]:
    """Return a row, its first token to look at, and cumulative lengths from there, with a boundary inside.

    Args:
        cu_seqlens: of all rows laid end to end; None, or none within a row: a boundary is made up.
        tokens: in a row, two at least.
    """
    inner = [place for place in cu_seqlens or () if place % tokens]
    row, boundary = divmod(inner[0], tokens) if inner else (0, max(min(tokens, STRETCH) // 3, 1))
    size = min(tokens, STRETCH)
    first = max(0, min(boundary - size // 2, tokens - size))
    start = row * tokens + first
    bounds = [0, *(place - start for place in inner if start < place < start + size)]
    if not inner:
        bounds.append(boundary)
    return row, first, [*bounds, size][: SAMPLES + 1]
