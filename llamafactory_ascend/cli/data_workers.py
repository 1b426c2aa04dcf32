"""A function over batches in several processes: results in order, few batches in memory, an end to Ctrl-C."""

import contextlib
import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from llamafactory_ascend.errors import AscendError

Batch = TypeVar("Batch")
Result = TypeVar("Result")
AHEAD = 2  # batches per process that wait for it

_function: Callable[[Any], Any] | None = None  # of a worker


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(function: Callable[[Batch], Result], batches: Iterable[Batch], workers: int) -> Generator[Result]:
    """Yield ``function(batch)`` of every batch, in their order.

    The workers are forks of this process: the function travels as it is, with the tokenizer it holds.

    Raises:
        AscendError: a worker was killed, as a rule because the memory is full.
    """
    if workers == 1:
        yield from map(function, batches)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page that it shares with this process
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _begin, (function,))
    waiting: deque[Future[Result]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_work, batch))
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise AscendError(
            "a worker process was killed, as a rule because the memory is full",
            f"use fewer: --workers {max(workers // 2, 1)}",
        ) from None
    except BaseException:
        _kill(pool)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(function: Callable[[Any], Any]) -> None:
    global _function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent answers it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _function = function


def _work(batch: Any) -> Any:
    assert _function is not None
    return _function(batch)


def _kill(pool: ProcessPoolExecutor) -> None:
    """End the workers where nobody waits for their results any more."""
    for process in list((pool._processes or {}).values()):
        with contextlib.suppress(OSError):
            process.terminate()
