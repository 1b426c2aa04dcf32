"""The adapter on disk is checked after every save; a run whose last adapter is missing or broken fails."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.sharding import is_adapter
from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.checks.adapter import AdapterCheck
    from llamafactory_ascend.run import Run


def check_adapter(folder: Path) -> "AdapterCheck":
    """Judge an adapter of any run from its files alone."""
    from llamafactory_ascend.checks.adapter import check

    return check(folder)


def not_whole(what: str, problems: list[str]) -> str:
    """Return a message whose first line names the first problem, for who shows that line alone."""
    return f"{what} is not whole: {problems[0]}" + "".join(f"\n  - {problem}" for problem in problems[1:])


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    assert run.arguments is not None
    if not is_adapter(run.arguments):
        return []
    from llamafactory_ascend.features.adapter_proof import AdapterProof
    from llamafactory_ascend.features.adapter_state import expected_shapes

    return [AdapterProof(run, expected_shapes(trainer.model))]


@hookimpl
def ascend_saved(run: "Run", trainer: "Trainer") -> None:
    """Check the adapter in output_dir on the rank that wrote it.

    Raises:
        AscendError: on every rank, where it is missing or broken.
    """
    assert run.arguments is not None
    if not is_adapter(run.arguments):
        return
    from llamafactory_ascend.report.gathering import all_gather

    folder = Path(run.arguments.training.output_dir)
    problems = (
        run.attempt("the check of the adapter", judge, run, trainer, folder)
        if trainer.args.should_save
        else []
    )
    broken = [problem for rank in all_gather(problems) for problem in rank or []]
    if broken:
        raise AscendError(
            not_whole(f"the adapter in {folder}", broken),
            "resume from the last good checkpoint (see `checkpoints` in ascend_report.json)",
        )


def judge(run: "Run", trainer: "Trainer", folder: Path) -> list[str]:
    """Check the adapter in a folder against what the Trainer's model has, and put the verdict in the report.

    Returns:
        The problems.
    """
    from llamafactory_ascend.checks.adapter import check
    from llamafactory_ascend.features.adapter_proof import AdapterProof

    proof = next((c for c in trainer.callback_handler.callbacks if isinstance(c, AdapterProof)), None)
    result = check(folder, proof.expected if proof else None, trained=proof.trained if proof else False)
    run.facts["adapter"] = {**(run.facts.get("adapter") or {}), **result.as_dict()}
    for warning in result.warnings:
        run.find("warning", "adapter", warning)
    return list(result.problems)


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `adapter`: the verdict on output_dir and on every checkpoint; null on other ranks."""
    return {"adapter": run.facts.get("adapter")}
