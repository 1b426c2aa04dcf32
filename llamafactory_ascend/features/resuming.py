"""The checkpoint a run resumes from: is it all there? A kill while it was saved leaves half a folder.

The host resumes from the folder with the highest number, so one half-written checkpoint stops every restart,
after the model is loaded and with a bare FileNotFoundError. PEFT fills what an adapter file lacks with the
values of a fresh adapter, without an error; the host goes on with a fresh optimizer where a checkpoint has
none. Of a file that was cut off it says what is wrong with it, not which one it is.
"""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import given_adapters
from llamafactory_ascend.features.sharding import is_adapter, uses_fsdp
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.run import Finding

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.run import Arguments, Run

STATE = "trainer_state.json"  # the Trainer writes it last
FRESH = ("optimizer.pt", "scheduler.pt")  # without either the host loads neither, and does not say so
RANDOM = "rng_state*.pth"  # without it the host says that a run is not reproduced
# What an OFT adapter's weights mean; a resume loads the weights and leaves these as the recipe has them.
OFT_MEANING = ("use_cayley_neumann", "num_cayley_neumann_terms", "coft", "block_share")


def checkpoint(training: Any) -> Path | None:
    """Return the folder a training resumes from, None where it starts afresh."""
    resume = training.resume_from_checkpoint if training.do_train else None
    if resume is True:
        from transformers.trainer_utils import get_last_checkpoint

        resume = get_last_checkpoint(training.output_dir) if Path(training.output_dir).is_dir() else None
    return Path(resume) if resume else None


def complete_ones(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints beside ``folder`` that were saved to their end, the latest first."""
    found = [path for path in folder.parent.glob("checkpoint-*") if not flaw_of_state(path)]
    numbered = [path for path in found if path.name.removeprefix("checkpoint-").isdecimal()]
    yield from sorted(numbered, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)


def another(folder: Path) -> str:
    """Say what to type instead of resuming from ``folder``."""
    good = next((path for path in complete_ones(folder) if path != folder), None)
    return f"remove it, or write `resume_from_checkpoint: {good}`" if good else "remove it to start afresh"


def flaw_of_state(folder: Path) -> str:
    """Say why a checkpoint's state of the Trainer cannot be read, "" where it can."""
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"has no {STATE}: the run was killed while it was saved"
    except (OSError, ValueError, RecursionError) as error:
        return f"has a {STATE} that cannot be read: {error}"
    return "" if isinstance(found, dict) else f"has a {STATE} that holds no mapping"


def missing_files(folder: Path) -> list[str]:
    """Return what a checkpoint lacks of the optimizer; of an FSDP or DeepSpeed run it lies elsewhere."""
    return [name for name in FRESH if not (folder / name).is_file()]


def cut_off_files(folder: Path) -> list[str]:
    """Return the files of ``torch.save`` that end too early: their table of contents stands last."""
    files = [folder / name for name in FRESH] + sorted(folder.glob(RANDOM))
    return [file.name for file in files if file.is_file() and not zipfile.is_zipfile(file)]


@hookimpl
def ascend_preflight(run: "Run", arguments: "Arguments") -> list[Finding]:
    folder = checkpoint(arguments.training)
    if folder is None or not folder.is_dir():
        return []
    flaw = flaw_of_state(folder)
    others = uses_fsdp(arguments.training) or arguments.training.deepspeed_plugin is not None
    if not flaw and not others and (cut := cut_off_files(folder)):
        flaw = f"has {' and '.join(cut)} cut off"
    if flaw:
        return [Finding("error", "resume", f"{folder} {flaw}; {another(folder)}")]
    if not others and (missing := missing_files(folder)):
        message = f"{folder} has no {' and no '.join(missing)}: the optimizer would start afresh"
        if arguments.training.save_only_model:
            return [Finding("warning", "resume", f"{message}, as `save_only_model` has it")]
        key = "adapter_name_or_path" if is_adapter(arguments) else "model_name_or_path"
        weights = f"to go on with its weights alone, `{key}: {folder}` and another output_dir"
        return [Finding("error", "resume", f"{message}; {another(folder)}; {weights}")]
    kind = given_adapters.of_folder(str(folder)).kind
    wanted = arguments.finetuning.finetuning_type
    if kind and kind != wanted:
        message = f"{folder} holds {given_adapters.article(kind)} adapter, but `finetuning_type` is {wanted}"
        return [Finding("error", "resume", f"{message}; choose another output_dir, or train on as {kind}")]
    return []


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
    refuse_other_rotations(folder, trainer.model)
    return []


def refuse_other_rotations(folder: Path, model: "nn.Module") -> None:
    """Let an OFT training resume only where it rotates as it did.

    Raises:
        AscendError: the checkpoint's weights would mean other rotations in this model.
    """
    from llamafactory_ascend.checks.adapter import CONFIG
    from llamafactory_ascend.features.adapter_state import find_peft_model

    saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    found = find_peft_model(model)
    if saved.get("peft_type") != "OFT" or found is None:
        return
    live = found[1].active_peft_config
    for key in OFT_MEANING:
        if key in saved and saved[key] != getattr(live, key):
            raise AscendError(
                f"{folder} was trained with `{key}: {saved[key]}`, this run has `{getattr(live, key)}`: its "
                "weights would mean other rotations",
                f"write `adapter_name_or_path: {folder}` to go on with what the adapter has",
            )
