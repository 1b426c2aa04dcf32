"""Evaluation on several ranks: does every rank get the same number of batches, and any at all?

By default accelerate repeats rows until it comes out even, and drops the repeated ones from the metrics. With
`even_batches: false` the ranks without a batch leave the others waiting in the first gathering: a run of one
row on two ranks hangs there. With `dataloader_drop_last: true` a small data set is never evaluated.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.run import Arguments, Run


def batches(rows: int, ranks: int, size: int, drop_last: bool, even: bool) -> tuple[int, int]:
    """Return the fewest and the most batches that a rank evaluates.

    Args:
        size: rows of a batch, `per_device_eval_batch_size`.
        even: `even_batches` of `accelerator_config`.
    """
    if drop_last:
        count = rows // size // ranks
        return count, count
    total = -(-rows // size)
    most = -(-total // ranks)
    return (most if even else total // ranks), most


def data_sets(trainer: "Trainer") -> dict[str, int]:
    """Return the rows of each evaluation data set whose length is known."""
    found: Any = trainer.eval_dataset
    named = found if isinstance(found, dict) else {"": found}
    return {name: len(rows) for name, rows in named.items() if hasattr(rows, "__len__")}


def judge(args: Any, sets: Mapping[str, int]) -> list[Finding]:
    """Judge the rows of evaluation data sets by the TrainingArguments of a run."""
    ranks, size = args.world_size, args.eval_batch_size
    strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
    if ranks == 1 or not (args.do_eval or strategy != "no"):
        return []
    found, even = [], args.accelerator_config.even_batches
    for name, rows in sets.items():
        what = f"{rows} evaluation rows{name and f' ({name})'}, {ranks} ranks, batches of {size}"
        fewest, most = batches(rows, ranks, size, args.dataloader_drop_last, even)
        if most == 0:
            message = f"{what}: with `dataloader_drop_last: true` none of them is evaluated; remove it"
            found.append(Finding("warning", "evaluation", message))
        elif fewest != most:
            message = (
                f"{what}: with `even_batches: false` some ranks evaluate {most} batches, others {fewest}, "
                "and those wait for ever; remove `even_batches` from `accelerator_config`"
            )
            found.append(Finding("error", "evaluation", message))
        elif rows < ranks * size:
            message = f"{what}: rows are repeated so that every rank has a batch"
            found.append(Finding("note", "evaluation", message))
    return found


def judge_early(arguments: "Arguments", counted: Mapping[str, int]) -> list[Finding]:
    """Judge before the model is loaded, by rows that were counted in files.

    Rows that the host leaves out are among them, so only what holds for fewer rows too is said: that there
    are not enough for every rank.

    Args:
        counted: data set -> its rows, where all of them were read.
    """
    data, training = arguments.data, arguments.training
    names = data.eval_dataset or []
    if not names or data.streaming or any(name not in counted for name in names):
        return []
    rows = {name: min(counted[name], data.max_samples or counted[name]) for name in names}
    if not data.eval_on_each_dataset:
        rows = {"": sum(rows.values())}
    enough = training.world_size * training.eval_batch_size
    return judge(training, {name: number for name, number in rows.items() if number < enough})


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    """Look at the rows; no callback is needed.

    Raises:
        AscendError: the first evaluation would hang.
    """
    for finding in judge(trainer.args, data_sets(trainer)):
        if finding.level == "error":
            raise AscendError(finding.message)
        run.find(finding.level, finding.subject, finding.message)
    return []
