"""How long the rows of a training are, and what `cutoff_len` leaves of them, in the run report."""

from typing import TYPE_CHECKING, Any

from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from llamafactory_ascend.checks.lengths.totals import Totals
    from llamafactory_ascend.run import Run

KEY = "lengths"
BINS = 40  # of the histogram at most


def record(run: "Run", totals: "Totals", rows: int, cutoff_len: int) -> None:
    """Keep the figures of the rows that were counted, of ``rows`` in all, for the report."""
    if totals.kept:
        run.facts[KEY] = summary(totals, rows, cutoff_len)


def summary(totals: "Totals", rows: int, cutoff_len: int) -> dict[str, Any]:
    figures = totals.as_dict()
    return {
        "rows": rows,
        "counted": totals.rows,
        "left_out": totals.dropped,
        "cutoff_len": cutoff_len,
        "over_cutoff": totals.over,
        "mean": figures["mean"],
        "percentiles": figures["percentiles"],
        "cutoff_len_that_keeps": figures["cutoff_len_that_keeps"],
        "tokens": figures["tokens"],
        "tokens_kept": figures["tokens_kept"],
        "supervised": {key: figures["supervised"][key] for key in ("total", "kept", "lost")},
        "histogram": [
            {"first": first, "last": last, "rows": count} for first, last, count in totals.tokens.bins(BINS)
        ],
    }


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    return {KEY: run.facts[KEY]} if KEY in run.facts else {}
