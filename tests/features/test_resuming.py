"""A checkpoint that is not all there is refused before a run resumes from it, with what to type instead."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import resuming
from llamafactory_ascend.run import Arguments, Run
from tests.training import adapted


def arguments(resume: Any, output_dir: str = "", **changes: Any) -> Arguments:
    training = {"do_train": True, "fsdp": [], "deepspeed_plugin": None, "save_only_model": False, **changes}
    training |= {"resume_from_checkpoint": resume, "output_dir": output_dir}
    finetuning = SimpleNamespace(finetuning_type="lora")
    return Arguments(None, None, SimpleNamespace(**training), finetuning, None)


def checkpoints(folder: Path, *complete: int) -> None:
    for step in complete:
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({"step": step}, folder / f"checkpoint-{step}" / name)


def test_a_checkpoint_that_was_cut_off_while_saving_is_refused_and_the_last_good_one_named(
    tmp_path: Path,
) -> None:
    checkpoints(tmp_path, 9, 10)
    (tmp_path / "checkpoint-11").mkdir()
    for resume in (str(tmp_path / "checkpoint-11"), True):  # as the host finds it, and as a recipe says it
        (finding,) = resuming.ascend_preflight(Run(), arguments(resume, str(tmp_path)))
        assert finding.level == "error"
        assert finding.message == (
            f"{tmp_path}/checkpoint-11 has no trainer_state.json: the run was killed while it was saved; "
            f"remove it, or write `resume_from_checkpoint: {tmp_path}/checkpoint-10`"
        )


def test_what_can_be_resumed_or_is_not_resumed_is_left_alone(tmp_path: Path) -> None:
    checkpoints(tmp_path, 9)
    (tmp_path / "checkpoint-11").mkdir()
    cut_off = str(tmp_path / "checkpoint-11")
    for good in (
        arguments(str(tmp_path / "checkpoint-9")),
        arguments(None),
        arguments(cut_off, do_train=False),
        arguments(True, str(tmp_path / "not made yet")),
    ):
        assert resuming.ascend_preflight(Run(), good) == []


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_file_of_a_checkpoint_that_was_cut_off_is_named(tmp_path: Path, name: str, share: float) -> None:
    """PyTorch says "failed finding central directory", the Trainer "Expecting value", and neither a file."""
    checkpoints(tmp_path, 9, 10)
    file = tmp_path / "checkpoint-10" / name
    file.write_bytes(file.read_bytes()[: int(len(file.read_bytes()) * share)])
    (finding,) = resuming.ascend_preflight(Run(), arguments(True, str(tmp_path)))
    assert finding.level == "error" and "checkpoint-10 has " in finding.message and name in finding.message
    assert finding.message.endswith(f"write `resume_from_checkpoint: {tmp_path}/checkpoint-9`")
    (finding,) = resuming.ascend_preflight(Run(), arguments(str(file.parent), fsdp=["full_shard"])) or (None,)
    assert (finding is None) is name.endswith((".pt", ".pth"))  # FSDP has files of its own


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_an_optimizer_that_would_start_afresh_is_an_error_unless_it_was_meant(
    tmp_path: Path, name: str
) -> None:
    """The Trainer loads neither where one of the two is missing, and says nothing."""
    checkpoints(tmp_path, 9, 10)
    (tmp_path / "checkpoint-10" / name).unlink()
    (finding,) = resuming.ascend_preflight(Run(), arguments(True, str(tmp_path)))
    assert finding.level == "error"
    assert finding.message.startswith(
        f"{tmp_path}/checkpoint-10 has no {name}: the optimizer would start afresh; remove it, or write "
        f"`resume_from_checkpoint: {tmp_path}/checkpoint-9`; to go on with its weights alone, "
    )
    (finding,) = resuming.ascend_preflight(Run(), arguments(True, str(tmp_path), save_only_model=True))
    assert finding.level == "warning"
    assert resuming.ascend_preflight(Run(), arguments(True, str(tmp_path), deepspeed_plugin=object())) == []


def test_where_no_other_checkpoint_is_complete_there_is_one_way_on(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    assert resuming.another(tmp_path / "checkpoint-1") == "remove it to start afresh"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("none", ""),
        ("missing", "1 of the model's 8 adapter tensors"),
        ("nan", "hold NaN"),
        ("cut", "was cut off"),
    ],
)
def test_a_damaged_adapter_is_not_resumed_from(
    assets: Path, tmp_path: Path, damage: str, message: str
) -> None:
    model = adapted(assets / "qwen3_5")
    folder, good = tmp_path / "checkpoint-2", tmp_path / "checkpoint-1"
    checkpoints(tmp_path, 1, 2)
    model.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    if damage == "missing":
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    elif damage == "nan":
        save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, file)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    run, trainer = Run(arguments=arguments(str(folder))), SimpleNamespace(model=model)
    if not message:
        assert resuming.ascend_trainer_callbacks(run, trainer) == []
        return
    with pytest.raises(AscendError, match=message) as error:
        resuming.ascend_trainer_callbacks(run, trainer)
    assert error.value.hint == f"remove it, or write `resume_from_checkpoint: {good}`"
    shutil.rmtree(good)
    run.arguments = arguments(str(folder), fsdp=["full_shard"])
    assert resuming.ascend_trainer_callbacks(run, trainer) == []  # it has files of its own


def checkpoint_of_oft(folder: Path, **config: Any) -> Any:
    """Save a model with an OFT adapter as a checkpoint, and return it."""
    from peft import OFTConfig, get_peft_model

    checkpoints(folder, 1)
    settings = {"oft_block_size": 4, "target_modules": ["0"], "use_cayley_neumann": False}
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), OFTConfig(**settings, **config))
    model.save_pretrained(folder / "checkpoint-1")
    return model


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_cayley_neumann", True), ("num_cayley_neumann_terms", 7), ("coft", True), ("block_share", True)],
)
def test_weights_are_not_resumed_as_other_rotations(tmp_path: Path, key: str, value: Any) -> None:
    """The Trainer loads a checkpoint's weights and leaves the configuration that the recipe made."""
    model = checkpoint_of_oft(tmp_path)
    folder = tmp_path / "checkpoint-1"
    run, trainer = Run(arguments=arguments(str(folder))), SimpleNamespace(model=model)
    run.arguments.finetuning.finetuning_type = "oft"
    assert resuming.ascend_trainer_callbacks(run, trainer) == []
    before = getattr(model.active_peft_config, key)
    setattr(model.active_peft_config, key, value)
    with pytest.raises(AscendError, match=f"was trained with `{key}: {before}`, this run has `{value}`"):
        resuming.ascend_trainer_callbacks(run, trainer)


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    checkpoint_of_oft(tmp_path)
    folder = tmp_path / "checkpoint-1"
    (finding,) = resuming.ascend_preflight(Run(), arguments(str(folder)))
    assert finding.level == "error"
    assert finding.message.startswith(f"{folder} holds an OFT adapter, but `finetuning_type` is lora; ")
