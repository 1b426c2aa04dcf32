"""FSDP from the recipe alone, two ranks on the simulated NPU, beside what the stock host does."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from llamafactory_ascend.checks.adapter import check
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import adapter_state, sharding, sharding_proof
from llamafactory_ascend.host.sharding import _judge_checkpoint, _says_offload
from llamafactory_ascend.run import Arguments, Run
from tests.running import Result, Train, torchrun

FULL = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
LAUNCHED = {**FULL, "ACCELERATE_USE_FSDP": "true"}  # as `accelerate launch` sets it, and the plugin
SHARDED = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}


def recipe(version: int = 2, options: str = "full_shard auto_wrap", **changes: Any) -> dict[str, Any]:
    """The lines a user adds for FSDP, and a checkpoint after step 2 of 4; every operator is stock's.

    Plain torchrun starts the ranks but where `command` is None, which is the stock command.
    """
    config: dict[str, Any] = {
        "version": version,
        "transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"],
        "cpu_ram_efficient_loading": True,
    }
    if version == 2:
        config["reshard_after_forward"] = True
    steps = {"save_strategy": "steps", "save_steps": 2, "model": "qwen3_5_bf16", "bf16": True}
    off = {"ascend": {"kernels": "off"}}
    start = {"ranks": 2, "command": torchrun(2)}
    return {**start, "fsdp": options, "fsdp_config": config, **steps, **off, **changes}


def four_digits(values: list[float]) -> list[str]:
    return [f"{value:.4g}" for value in values]


@pytest.fixture(scope="module")
def default(train_once: Train) -> Result:
    return train_once(**recipe(command=None))


@pytest.fixture(scope="module")
def stock_full(train_once: Train) -> Result:
    return train_once(**recipe(env=LAUNCHED, plugin=False))


def resume(train: Train, of: Result, **changes: Any) -> Result:
    return train(**recipe(resume_from_checkpoint=str(of.output / "checkpoint-2"), **changes))


def test_the_adapter_is_whole_in_output_dir_and_every_checkpoint(default: Result) -> None:
    assert default.code == 0, default.text
    for folder in (default.output, default.output / "checkpoint-2", default.output / "checkpoint-4"):
        result = check(folder)
        assert (result.problems, result.tensors) == ((), 8), folder
    last = load_file(default.output / "checkpoint-4" / "adapter_model.safetensors")
    for key, tensor in load_file(default.output / "adapter_model.safetensors").items():
        assert torch.equal(tensor, last[key])


def test_the_adapter_is_that_of_the_stock_full_state(default: Result, stock_full: Result) -> None:
    stock = load_file(stock_full.output / "adapter_model.safetensors")
    ours = load_file(default.output / "adapter_model.safetensors")
    assert ours.keys() == stock.keys()
    assert all(torch.equal(ours[key], stock[key]) for key in stock)


def test_the_report_says_how_the_model_was_sharded_and_what_was_saved(default: Result) -> None:
    report = default.report
    assert [rank["sharding"] for rank in report["ranks"]] == 2 * [
        {
            "whole_model": True,
            "modules": 5,
            "classes": {"Qwen3_5DecoderLayer": [4, 4]},
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "offload": False,
        }
    ]
    adapter = report["ranks"][0]["adapter"]
    assert adapter["ok"]
    assert adapter["problems"] == []
    assert adapter["bytes"] == (default.output / "adapter_model.safetensors").stat().st_size
    assert {name: entry["ok"] for name, entry in adapter["checkpoints"].items()} == {
        "checkpoint-2": True,
        "checkpoint-4": True,
    }
    assert report["ranks"][1]["adapter"] is None
    assert report["decisions"]["fsdp state"]["choice"] == "SHARDED_STATE_DICT"
    assert report["decisions"]["fsdp model files"]["choice"] == "the whole adapter"
    assert report["decisions"]["fsdp loading"]["choice"] == "by rank 0 of each machine, on its CPU"
    assert report["decisions"]["fsdp frozen shards"]["choice"] == "bfloat16"


def test_resume_with_the_default_state(train_once: Train, default: Result) -> None:
    resumed = resume(train_once, default)
    assert resumed.code == 0, resumed.text
    assert four_digits(resumed.grad_norms) == four_digits(default.grad_norms)
    assert four_digits(resumed.losses) == four_digits(default.losses)


def test_resume_with_a_full_state(train_once: Train, default: Result) -> None:
    whole = train_once(**recipe(env=FULL))
    assert whole.code == 0, whole.text
    state = torch.load(whole.output / "checkpoint-2" / "pytorch_model_fsdp.bin", weights_only=True)
    saved = load_file(whole.output / "checkpoint-2" / "adapter_model.safetensors")
    assert len(state) == len(saved) == 8
    for key, tensor in saved.items():
        assert torch.equal(state[key.replace(".weight", ".default.weight")], tensor)
    resumed = resume(train_once, whole, env=FULL)
    assert resumed.code == 0, resumed.text
    assert four_digits(resumed.grad_norms) == four_digits(default.grad_norms)
    assert four_digits(resumed.losses) == four_digits(default.losses)


def test_a_checkpoint_of_stock_is_repaired_from_the_adapter_beside_it(
    train_once: Train, stock_full: Result
) -> None:
    """Stock resumes from such a slice as if it were the adapter."""
    found = torch.load(stock_full.output / "checkpoint-2" / "pytorch_model_fsdp.bin", weights_only=True)
    saved = load_file(stock_full.output / "checkpoint-2" / "adapter_model.safetensors")
    for key, tensor in saved.items():
        assert torch.equal(found[key].to_local().cpu(), tensor[: len(tensor) // 2])
    resumed = resume(train_once, stock_full)
    assert resumed.code == 0, resumed.text
    assert "pytorch_model_fsdp.bin is not whole (it holds the slice of rank 0 only)" in resumed.text
    assert resumed.report["decisions"]["fsdp state"]["choice"] == "FULL_STATE_DICT"
    assert resumed.report["decisions"]["resume"]["choice"].endswith("checkpoint-2/adapter_model.safetensors")
    assert four_digits(resumed.grad_norms) == four_digits(stock_full.grad_norms)
    assert four_digits(resumed.losses) == four_digits(stock_full.losses)


def test_cpu_offload(train_once: Train, default: Result) -> None:
    config = {**recipe()["fsdp_config"], "offload_params": True}
    offloaded = train_once(**recipe(fsdp_config=config))
    assert offloaded.code == 0, offloaded.text
    assert offloaded.report["ranks"][1]["sharding"]["offload"]
    assert offloaded.report["decisions"]["process group"]["choice"] == "cpu:gloo,npu:hccl"
    assert four_digits(offloaded.losses) == four_digits(default.losses)
    assert four_digits(offloaded.grad_norms) == four_digits(default.grad_norms)
    left = [run.report["ranks"][1]["memory"]["allocated"] for run in (offloaded, default)]
    assert left[0] < left[1] / 2  # the shards lie on the host
    assert check(offloaded.output).ok


def test_fsdp1_with_a_sharded_state(train_once: Train, default: Result) -> None:
    result = train_once(**recipe(version=1, env=SHARDED))
    assert result.code == 0, result.text
    assert check(result.output).problems == check(result.output / "checkpoint-2").problems == ()
    assert result.report["ranks"][0]["sharding"]["version"] == 1
    # FSDP1 casts buffers to bfloat16 too; a rank that had not been given its weights would halve the norm.
    assert result.grad_norms[0] == pytest.approx(default.grad_norms[0], rel=0.2)
    resumed = resume(train_once, result, version=1, env=SHARDED)
    assert resumed.code == 0, resumed.text
    assert four_digits(resumed.grad_norms) == four_digits(result.grad_norms)


def test_full_fine_tuning_ends_with_a_whole_model(train_once: Train) -> None:
    tuned = train_once(**recipe(finetuning_type="full", max_steps=2, save_strategy="no", model="qwen3_5"))
    assert tuned.code == 0, tuned.text
    assert tuned.report["decisions"]["fsdp model files"]["choice"] == "the whole model"
    before = load_file(train_once.assets / "qwen3_5" / "model.safetensors")
    after = load_file(tuned.output / "model.safetensors")
    assert {key: value.shape for key, value in after.items()} == {key: v.shape for key, v in before.items()}


def arguments(**training: Any) -> Arguments:
    values = {
        "fsdp": ["full_shard", "auto_wrap"],
        "fsdp_config": {},
        "fsdp_plugin_args": {"fsdp_version": 2},
        "resume_from_checkpoint": None,
        "save_only_model": False,
        "use_cpu": False,
        "do_train": True,
        "device": torch.device("meta"),
    }
    finetuning = SimpleNamespace(finetuning_type=training.pop("finetuning_type", "lora"))
    return Arguments(None, None, SimpleNamespace(**{**values, **training}), finetuning, None)


@pytest.mark.parametrize(
    ("environment", "training", "kind"),
    [
        (None, {}, "SHARDED_STATE_DICT"),
        (None, {"fsdp_plugin_args": {"fsdp_version": 1}}, "FULL_STATE_DICT"),
        (None, {"save_only_model": True}, "FULL_STATE_DICT"),
        ("1", {}, "FULL_STATE_DICT"),
        ("full_state_dict", {}, "FULL_STATE_DICT"),
        (None, {"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}, "FULL_STATE_DICT"),
    ],
)
def test_the_state_type(
    monkeypatch: pytest.MonkeyPatch, environment: str | None, training: dict[str, Any], kind: str
) -> None:
    monkeypatch.delenv(sharding.VARIABLE, raising=False)
    if environment:
        monkeypatch.setenv(sharding.VARIABLE, environment)
    run = Run()
    given = arguments(**training)
    sharding.ascend_arguments(run, given)
    assert given.training.fsdp_plugin_args["state_dict_type"] == kind
    assert run.decisions["fsdp state"].choice == kind


def test_contradicting_state_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sharding.VARIABLE, "FULL_STATE_DICT")
    with pytest.raises(AscendError, match="contradict each other"):
        sharding.chosen_type({"state_dict_type": "SHARDED_STATE_DICT"})
    with pytest.raises(AscendError, match="`FSDP_STATE_DICT_TYPE: half` is no state dict type"):
        monkeypatch.setenv(sharding.VARIABLE, "half")
        sharding.chosen_type({})


def test_the_type_of_the_checkpoint_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(sharding.VARIABLE, raising=False)
    (tmp_path / "pytorch_model_fsdp.bin").touch()
    given = arguments(resume_from_checkpoint=str(tmp_path))
    assert sharding.decide_state_type(Run(), given) == "FULL_STATE_DICT"
    monkeypatch.setenv(sharding.VARIABLE, "SHARDED_STATE_DICT")
    with pytest.raises(AscendError, match="was saved with FULL_STATE_DICT, but `FSDP_STATE_DICT_TYPE` says"):
        sharding.decide_state_type(Run(), given)


def test_shards_only_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sharding.VARIABLE, "SHARDED_STATE_DICT")
    run = Run()
    sharding.ascend_arguments(run, arguments(finetuning_type="full"))
    assert run.facts["sharding"] == {"whole_model": False}
    assert "accelerate merge-weights" in run.findings[0].message
    run = Run()
    sharding.ascend_arguments(run, arguments(finetuning_type="lora"))
    assert run.facts["sharding"] == {"whole_model": True}


@pytest.mark.parametrize(("strict", "level"), [(False, "warning"), (True, "error")])
def test_fsdp_on_a_cpu_is_a_finding(strict: bool, level: str) -> None:
    run = Run()
    run.settings = run.settings.model_copy(update={"strict": strict})
    (finding,) = sharding.ascend_preflight(run, arguments(use_cpu=True))
    assert (finding.level, finding.subject) == (level, "sharding")
    assert "`use_cpu: true`" in finding.message
    assert sharding.ascend_preflight(run, arguments()) == []


def test_classes_without_auto_wrap_are_a_finding() -> None:
    config = {"transformer_layer_cls_to_wrap": ["Linear"]}
    (finding,) = sharding.ascend_preflight(Run(), arguments(fsdp=["full_shard"], fsdp_config=config))
    assert "no effect without `auto_wrap`" in finding.message


def test_a_class_the_model_does_not_have() -> None:
    run = Run()
    run.arguments = arguments(fsdp_config={"transformer_layer_cls_to_wrap": ["Linear", "Qwen9Layer"]})
    with pytest.raises(AscendError, match="no module of this model is a Qwen9Layer"):
        sharding.ascend_after_model(run, nn.Sequential(nn.Linear(2, 2)))
    run.arguments.training.fsdp_plugin_args["fsdp_version"] = 1  # which wraps layers of its own choice
    sharding.ascend_after_model(run, nn.Sequential(nn.Linear(2, 2)))
    assert "no module of this model is a Qwen9Layer" in run.findings[0].message


@pytest.mark.parametrize(
    ("config", "offload"),
    [(None, False), ({"offload_params": True}, True), ('{"fsdp_offload_params": "true"}', True), ({}, False)],
)
def test_offload_in_the_config(config: Any, offload: bool) -> None:
    assert _says_offload(config) is offload


def test_offload_in_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text(json.dumps({"offload_params": True}))
    assert _says_offload(str(tmp_path / "fsdp.json"))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def peft_model() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = nn.Sequential()
    base.add_module("first", nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
    base.add_module("head", nn.Linear(4, 3))
    return get_peft_model(base, LoraConfig(r=2, target_modules=["0", "1"], modules_to_save=["head"]))


def shard(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for module in list(model.modules()):
        if type(module) is nn.Sequential and len(module) == 2 and hasattr(module, "0"):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def test_gathering_takes_the_adapter_and_nothing_else(one_rank: None) -> None:
    model = peft_model()
    wanted = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    gathered = adapter_state.gather(shard(model))
    assert gathered.keys() == wanted.keys()
    assert len(gathered) == 2 * 2 + 2
    assert all(torch.equal(gathered[name], tensor) for name, tensor in wanted.items())


def test_counting(one_rank: None) -> None:
    section = sharding_proof.count(shard(peft_model()), ["Sequential"])
    assert section == {"modules": 2, "classes": {"Sequential": [1, 2]}}
    assert sharding_proof.problems(section)[0] == (
        "1 of 2 modules of class Sequential are FSDP units of their own"
    )
    assert sharding_proof.problems({"modules": 1, "classes": {}}) == [
        "1 FSDP module: no layer is a unit of its own"
    ]


def test_a_checkpoint_that_cannot_be_repaired_is_refused(one_rank: None, tmp_path: Path) -> None:
    model = peft_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.save_pretrained(tmp_path)
    whole = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    file, adapter = tmp_path / "pytorch_model_fsdp.bin", tmp_path / "adapter_model.safetensors"
    torch.save(whole, file)
    assert _judge_checkpoint(model, tmp_path)[:2] == ("", "")

    first = next(iter(whole))
    torch.save({**whole, first: whole[first][:1]}, file)
    fault, error, state = _judge_checkpoint(model, tmp_path)
    assert fault.startswith(f"its `{first}` has shape [1, 4] instead of [2, 4]")
    assert error == ""
    assert adapter_state.state_problem(model, state) == ""

    tensors = load_file(adapter)
    save_file({key: value for key, value in tensors.items() if "lora_B" not in key}, adapter)
    fault, error, _ = _judge_checkpoint(model, tmp_path)
    assert "nor is" in error
    assert "lora_A without lora_B" in error


def test_a_slice_is_not_whole(one_rank: None) -> None:
    model = shard(peft_model())
    state = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert adapter_state.state_problem(model, state) == "it holds the slice of rank 0 only"
    assert adapter_state.state_problem(model, {}).startswith("it holds no `base_model.model.first.0.lora_A")
