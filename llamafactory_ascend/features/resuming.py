"""The checkpoint a run resumes from: is it all there? A kill while it was saved leaves half a folder.

The host resumes from the folder with the highest number, so one half-written checkpoint stops every restart,
after the model is loaded and with a bare FileNotFoundError. PEFT fills what an adapter file lacks with the
values of a fresh adapter, without an error.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.sharding import is_adapter, uses_fsdp
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.run import Arguments, Run

STATE = "trainer_state.json"  # the Trainer writes it last


def checkpoint(training: Any) -> Path | None:
    """Return the folder a training resumes from, None where it starts afresh."""
    resume = training.resume_from_checkpoint if training.do_train else None
    if resume is True:
        from transformers.trainer_utils import get_last_checkpoint

        resume = get_last_checkpoint(training.output_dir) if Path(training.output_dir).is_dir() else None
    return Path(resume) if resume else None


def complete_ones(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints beside ``folder`` that were saved to their end, the latest first."""
    found = [path.parent for path in folder.parent.glob(f"checkpoint-*/{STATE}")]
    numbered = [path for path in found if path.name.removeprefix("checkpoint-").isdigit()]
    yield from sorted(numbered, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)


def another(folder: Path) -> str:
    """Say what to type instead of resuming from ``folder``."""
    good = next((path for path in complete_ones(folder) if path != folder), None)
    return f"remove it, or write `resume_from_checkpoint: {good}`" if good else "remove it to start afresh"


@hookimpl
def ascend_preflight(run: "Run", arguments: "Arguments") -> list[Finding]:
    folder = checkpoint(arguments.training)
    if folder is None or not folder.is_dir() or (folder / STATE).is_file():
        return []
    message = f"{folder} has no {STATE}: the run was killed while it was saved; {another(folder)}"
    return [Finding("error", "resume", message)]


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    """Compare the adapter to resume from with the model's, before the Trainer loads it.

    Raises:
        AscendError: it is broken or not the whole of it.
    """
    assert run.arguments is not None
    training = run.arguments.training
    folder = checkpoint(training)
    # FSDP and DeepSpeed resume from files of their own.
    others = uses_fsdp(training) or training.deepspeed_plugin is not None
    if folder is None or others or not folder.is_dir() or not is_adapter(run.arguments):
        return []
    from llamafactory_ascend.checks.adapter import check
    from llamafactory_ascend.features.adapter_state import expected_shapes

    result = check(folder, expected_shapes(trainer.model) or {}, trained=False)
    if not result.ok:
        raise AscendError(
            f"the adapter in {folder} is not whole: {'; '.join(result.problems)}", another(folder)
        )
    return []
