"""The run report: what happened on every rank, as ``ascend_report.json`` and as a table in the log."""
