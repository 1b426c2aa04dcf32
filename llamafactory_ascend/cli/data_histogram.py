"""Lengths of rows as a picture: lines of text for a terminal, PNG for a file."""

import os
import tempfile
from pathlib import Path

from llamafactory_ascend.checks.lengths.histogram import Histogram

BAR = 50  # characters
BLOCKS = " ▏▎▍▌▋▊▉█"


def draw_text(histogram: Histogram, cutoff_len: int, count: int = 16) -> list[str]:
    """Return one line per bin: its lengths, a bar, rows; a line marks where `cutoff_len` is."""
    bins = list(histogram.bins(count))
    most = max((rows for *_, rows in bins), default=0)
    if not most:
        return []
    width = len(f"{bins[-1][1]:,}")
    lines, marked = [], False
    for first, last, rows in bins:
        if not marked and last >= cutoff_len:
            lines.append(f"{'':{2 * width + 3}} --- cutoff_len {cutoff_len:,} ---")
            marked = True
        eighths = round(8 * BAR * rows / most) or (1 if rows else 0)
        bar = "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()
        lines.append(f"{first:>{width},} - {last:>{width},} {bar:<{BAR}} {rows:,}".rstrip())
    return lines


def plot(histogram: Histogram, cutoff_len: int, title: str, file: Path) -> None:
    """Write a PNG in one go: what was there stays until the new one is whole."""
    import matplotlib  # type: ignore[import-untyped]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-untyped]

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    bins = list(histogram.bins(60))
    axes.bar(
        [first for first, *_ in bins],
        [rows for *_, rows in bins],
        width=[last + 1 - first for first, last, _ in bins],
        align="edge",
        color="#3b6ea5",
    )
    axes.axvline(cutoff_len, color="#b03030", label=f"cutoff_len {cutoff_len:,}")
    if bins:
        end = bins[-1][1] + 1
        far = cutoff_len > 2 * end  # the rows would be a heap at the left edge; the legend names it
        axes.set_xlim(min(bins[0][0], cutoff_len * 0.98), end if far else max(end, cutoff_len * 1.02))
    axes.set_xlabel("tokens of a row, before cutoff_len")
    axes.set_ylabel("rows")
    axes.set_title(title)
    axes.legend()
    handle, scratch = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-", suffix=".png")
    os.close(handle)
    try:
        figure.savefig(scratch, dpi=120)
        Path(scratch).chmod(0o644)
        Path(scratch).replace(file)
    finally:
        pyplot.close(figure)
        Path(scratch).unlink(missing_ok=True)
