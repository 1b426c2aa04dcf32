"""Tiny random models and data for tests and benchmarks, made on the spot: nothing is downloaded.

Every weight and every row follows from a fixed seed, so two builds with the same transformers are
equal to the bit. `python -m tests.assets DIR [name ...]` does the same from the command line.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock

from .data import DATA_FOLDERS, write_data
from .models import MODELS, write_models

NAMES: tuple[str, ...] = (*DATA_FOLDERS, *MODELS)

__all__ = ["NAMES", "build"]


def build(root: Path, names: Iterable[str] | None = None) -> None:
    """Make sure that `root/<name>` exists for every name, default all of `NAMES`.

    A folder that is there is complete and is left as it is: everything is built in a hidden folder beside
    it and renamed into place under a file lock, so any number of processes may call this at once. Delete
    a folder to have it rebuilt. The random state of the calling process is not disturbed.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    wanted = list(NAMES if names is None else names)
    unknown = sorted(set(wanted) - set(NAMES))
    if unknown:
        raise ValueError(f"tests.assets: unknown name {', '.join(unknown)}; known names: {', '.join(NAMES)}")
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".lock"):
        missing = [name for name in wanted if not (root / name).is_dir()]
        if not missing:
            return
        with tempfile.TemporaryDirectory(dir=root, prefix=".building-") as scratch:
            built = Path(scratch)
            write_data(built, [name for name in missing if name in DATA_FOLDERS])
            write_models(built, [name for name in missing if name in MODELS])
            for name in dict.fromkeys(missing):
                (built / name).replace(root / name)
