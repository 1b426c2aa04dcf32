"""Peak device memory of every rank, for the report."""

from typing import TYPE_CHECKING, Any

from llamafactory_ascend import device
from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from llamafactory_ascend.run import Run


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `memory`: bytes allocated and reserved now and at the peak; null on a CPU."""
    used = run.arguments.training.device.type if run.arguments else device.decide().type
    return {"memory": device.memory(used)}
