"""Where the plugin speaks: one logger on stderr, rank 0 unless said otherwise."""

import logging
import os
import sys
from typing import TextIO

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
    """Return the global rank that the launcher gave this process, 0 when there is none or it is no number."""
    text = os.environ.get("RANK", "")
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
