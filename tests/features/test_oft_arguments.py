"""The arguments of an OFT training: whose word holds, what is refused, what is said."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.training_args import ParallelMode

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import oft_arguments
from llamafactory_ascend.run import Arguments, Run


def arguments(given: dict[str, Any] | None = None, ranks: int = 1, **training: Any) -> Arguments:
    """The host's defaults with OFT, and what somebody wrote."""
    finetuning = {
        "finetuning_type": "oft",
        "stage": "sft",
        "lora_target": ["all"],
        "oft_target": ["all"],
        "oft_rank": 0,
        "oft_block_size": 32,
        "module_dropout": 0.0,
        "additional_target": None,
        "create_new_adapter": False,
        "ref_model_adapters": None,
        "reward_model_adapters": None,
        "reward_model_type": "lora",
        "reward_model": None,
    }
    given = dict(given or {})
    model = {"adapter_folder": None, "infer_backend": "huggingface"}
    model["adapter_name_or_path"] = given.pop("adapter_name_or_path", None)
    mode = ParallelMode.DISTRIBUTED if ranks > 1 else ParallelMode.NOT_PARALLEL
    host = {
        "do_train": True,
        "label_names": None,
        "ddp_find_unused_parameters": None,
        "parallel_mode": mode,
        **training,
    }
    return Arguments(
        SimpleNamespace(**model),
        None,
        SimpleNamespace(**host),
        SimpleNamespace(**{**finetuning, **given}),
        None,
    )


def settle(given: dict[str, Any], **changes: Any) -> tuple[Run, Arguments]:
    run, found = Run(given=frozenset(given)), arguments(given, **changes)
    oft_arguments.ascend_arguments(run, found)
    return run, found


def adapter(folder: Path, kind: str = "OFT", **config: Any) -> str:
    """A folder with what PEFT reads first."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": kind, "peft_version": "0.18.0", **config}
    if kind == "OFT":
        settings = {
            "use_cayley_neumann": False,
            "oft_block_size": 32,
            "r": 0,
            "module_dropout": 0.0,
            **settings,
        }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def said(run: Run) -> list[str]:
    return [finding.message for finding in run.findings]


@pytest.mark.parametrize(
    ("given", "targets", "conflict"),
    [
        ({}, ["all"], False),
        ({"oft_target": ["q_proj"]}, ["q_proj"], False),
        ({"lora_target": ["q_proj"]}, ["q_proj"], False),
        (
            {"oft_target": ["q_proj", "v_proj"], "lora_target": ["v_proj", "q_proj"]},
            ["q_proj", "v_proj"],
            False,
        ),
        ({"oft_target": ["q_proj"], "lora_target": ["v_proj"]}, ["q_proj"], True),
        ({"oft_target": ["all"], "lora_target": ["v_proj"]}, ["all"], True),
        ({"oft_target": ["q_proj"], "lora_target": ["all"]}, ["q_proj"], True),
    ],
)
def test_targets(given: dict[str, Any], targets: list[str], conflict: bool) -> None:
    """The host reads `lora_target`, whatever the method."""
    run, found = settle(given)
    assert found.finetuning.lora_target == targets
    assert [message.endswith("differ: oft_target holds") for message in said(run)] == [True] * conflict
    assert run.decisions["oft targets"].choice == ",".join(targets)


def test_a_default_that_nobody_wrote_is_no_wish() -> None:
    """Without knowing what was written, only what differs from the default counts."""
    run, found = Run(), arguments({"lora_target": ["v_proj"]})
    oft_arguments.ascend_arguments(run, found)
    assert found.finetuning.lora_target == found.finetuning.oft_target == ["v_proj"]
    assert said(run) == []


def test_what_the_host_sets_for_lora_alone() -> None:
    run, found = settle({}, ranks=2)
    assert found.training.label_names == ["labels"]
    assert found.training.ddp_find_unused_parameters is False
    assert run.decisions["ddp_find_unused_parameters"].choice == "False"


def test_what_the_user_sets_stays() -> None:
    _, found = settle({}, ranks=2, label_names=["x"], ddp_find_unused_parameters=True)
    assert found.training.label_names == ["x"]
    assert found.training.ddp_find_unused_parameters is True
    _, alone = settle({})
    assert alone.training.ddp_find_unused_parameters is None


def test_lora_is_left_to_the_host() -> None:
    _, found = settle({"finetuning_type": "lora", "oft_target": ["q_proj"]}, ranks=2)
    assert (found.finetuning.lora_target, found.training.label_names) == (["all"], None)
    assert found.training.ddp_find_unused_parameters is None


def test_oft_rank_alone_is_enough() -> None:
    """PEFT refuses the host's own default: only one of `r` and `oft_block_size` may be given."""
    _, found = settle({"oft_rank": 8})
    assert (found.finetuning.oft_rank, found.finetuning.oft_block_size) == (8, 0)
    with pytest.raises(AscendError, match="are both given"):
        settle({"oft_rank": 8, "oft_block_size": 16})
    with pytest.raises(AscendError, match="are both 0"):
        settle({"oft_block_size": 0})


@pytest.mark.parametrize("value", [-8, 8.0, "8", True, None], ids=repr)
@pytest.mark.parametrize("key", ["oft_rank", "oft_block_size"])
def test_sizes_that_are_no_whole_numbers(key: str, value: Any) -> None:
    """PEFT makes a tensor of -8 rows of them, or of 8.0."""
    with pytest.raises(AscendError, match=f"`{key}: {value}` is no whole number"):
        settle({key: value})


@pytest.mark.parametrize("key", ["use_galore", "use_apollo", "use_badam"])
def test_an_optimizer_of_the_base_model_is_refused(key: str) -> None:
    with pytest.raises(AscendError, match=f"`{key}: true` chooses among the base model's weights"):
        settle({key: True})


@pytest.mark.parametrize(("kind", "wanted"), [("OFT", "lora"), ("LORA", "oft")])
def test_training_does_not_go_on_as_another_kind(tmp_path: Path, kind: str, wanted: str) -> None:
    path = adapter(tmp_path, kind)
    with pytest.raises(AscendError, match=f"but `finetuning_type` is {wanted}") as error:
        settle({"finetuning_type": wanted, "adapter_name_or_path": [path]})
    assert f"write `finetuning_type: {kind.lower()}`" in error.value.hint
    run, _ = settle({"finetuning_type": wanted, "adapter_name_or_path": [path], "create_new_adapter": True})
    assert said(run) == []  # it is merged
    other = adapter(tmp_path / "other", wanted.upper())
    settle({"finetuning_type": wanted, "adapter_name_or_path": [path, other]})  # the last one goes on
    run, found = settle({"finetuning_type": wanted, "adapter_name_or_path": [path]}, do_train=False)
    assert found.finetuning.finetuning_type == kind.lower()  # an evaluation loads it as what it is
    assert "and is loaded as one" in said(run)[0]


def test_an_adapter_of_a_kind_the_host_does_not_train(tmp_path: Path) -> None:
    with pytest.raises(AscendError, match="is an IA3 adapter") as error:
        settle({"adapter_name_or_path": [adapter(tmp_path, "IA3")]})
    assert error.value.hint == "the host trains `lora` and `oft` adapters only"


def test_wishes_that_the_adapter_overrules_are_named(tmp_path: Path) -> None:
    path = adapter(
        tmp_path, oft_block_size=8, target_modules=["v_proj", "q_proj"], modules_to_save=["lm_head"]
    )
    wishes = {"oft_target": ["q_proj"], "oft_block_size": 16, "additional_target": ["lm_head"]}
    run, _ = settle({"adapter_name_or_path": [path], **wishes})
    assert [message.split(" has no effect")[0] for message in said(run)] == [
        "`oft_block_size: 16`",
        "`oft_target: ['q_proj']`",
    ]
    run, _ = settle({"adapter_name_or_path": [path], "oft_block_size": 8, "oft_target": ["all"]})
    assert said(run) == []


@pytest.mark.parametrize("setting", ["ref_model_adapters", "reward_model"])
def test_other_adapters_of_a_run_are_read_too(tmp_path: Path, setting: str) -> None:
    old = adapter(tmp_path, use_cayley_neumann=True, peft_version="0.17.0")
    stage = "ppo" if setting == "reward_model" else "dpo"
    with pytest.raises(AscendError, match=r"is of PEFT 0\.17\.0 below 0\.18"):
        settle({"stage": stage, "reward_model_type": "oft", setting: old, "reward_model": old})


def test_a_reward_adapter_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AscendError, match="one model cannot hold both") as error:
        reward = {"reward_model_type": "oft", "reward_model": adapter(tmp_path, "LORA")}
        settle({"stage": "ppo", **reward})
    assert "`reward_model_type: full`" in error.value.hint


def test_an_adapter_of_an_older_peft_is_saved_as_what_it_becomes() -> None:
    from peft import OFTConfig, __version__

    from llamafactory_ascend.settings import read

    config = OFTConfig(oft_block_size=8, peft_version="0.17.0")
    model = SimpleNamespace(peft_config={"default": config})
    oft_arguments.ascend_after_model(Run(), model)
    assert config.peft_version == "0.17.0"
    oft_arguments.ascend_after_model(Run(settings=read({"oft": {"any_version": True}}, "x")), model)
    assert config.peft_version == __version__


def test_an_adapter_that_cannot_be_read_is_left_to_peft(tmp_path: Path) -> None:
    for path in ("nobody/has-this", str(tmp_path)):
        run, found = settle({"adapter_name_or_path": [path]})
        assert said(run) == []
        assert found.finetuning.finetuning_type == "oft"
