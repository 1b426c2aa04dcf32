"""Where the plugin speaks: one logger on stderr, rank 0 unless said otherwise."""

import functools
import logging
import os
import sys
from typing import Any, TextIO

from llamafactory_ascend.errors import AscendError

TRACE = "LLAMAFACTORY_ASCEND_TRACE"

_logger = logging.getLogger("llamafactory_ascend")


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at the time: progress bars and notebooks replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _ready() -> logging.Logger:
    if not _logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("[llamafactory-ascend] %(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
        _logger.propagate = False  # the host's root handler would print every line twice
    return _logger


def rank() -> int:
    """Return the global rank that the launcher gave this process, 0 when there is none or it is no number.

    Whoever starts ranks sets LOCAL_RANK too. A RANK alone is of another program, or of the pod (Kubernetes'
    PyTorchJob); Accelerate, and with it the training, does not read it either.
    """
    text = os.environ.get("RANK", "") if "LOCAL_RANK" in os.environ else ""
    return int(text) if text.isdigit() else 0


def info(message: str) -> None:
    """Say something once for the whole job."""
    if rank() == 0:
        _ready().info(message)


def warn(message: str, every_rank: bool = False) -> None:
    """Say that something needs attention; on every rank where each may differ."""
    if every_rank:
        _ready().warning(f"rank {rank()}: {message}")
    elif rank() == 0:
        _ready().warning(message)


def is_tracing() -> bool:
    """True where the user wants to see the plugin's own calls and tracebacks."""
    return os.environ.get(TRACE, "").lower() in {"1", "true", "on", "yes"}


@functools.cache
def hide_tracebacks() -> None:
    """Let an AscendError that nobody catches print its message alone; once per process.

    It is a decision with a next step in it, and forty lines of frames above it look like a crash. Other
    exceptions print what they always did, and so does this one where the user traces the plugin.
    """
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, AscendError) and not is_tracing():
            print(f"[llamafactory-ascend] {error}", file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)

    sys.excepthook = excepthook
