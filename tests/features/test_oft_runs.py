"""OFT through the stock commands: pre-training, resume, fine-tuning on top, export, two ranks."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from llamafactory_ascend.checks.adapter import check
from tests.running import BIN, Result, Train, environment, torchrun
from tests.training import IDS, load

RATE = 1e-2
QWEN2 = {"model": "qwen2", "template": "default", "npu": False, "use_cpu": True}
OFT: dict[str, Any] = {
    "finetuning_type": "oft",
    "oft_block_size": 8,
    "lora_rank": None,
    "lora_target": None,
    "learning_rate": RATE,
}
PRETRAINING = {
    **QWEN2,
    **OFT,
    "stage": "pt",
    "dataset": "tiny_pt",
    "oft_target": "q_proj,down_proj",
    "lora_target": "v_proj",
    "additional_target": "lm_head",
    "val_size": 0.25,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "adapter_model.safetensors")
    return found


def messages(result: Result) -> list[str]:
    return [finding["message"] for finding in result.report["findings"]]


@pytest.fixture(scope="module")
def pretrained(train_once: Train) -> Result:
    result = train_once(**PRETRAINING)
    assert result.code == 0, result.text
    return result


@pytest.fixture(scope="module")
def finetuned(train_once: Train, pretrained: Result) -> Result:
    changes = {"adapter_name_or_path": str(pretrained.output), "learning_rate": RATE / 100, "max_steps": 2}
    result = train_once(**{**QWEN2, **OFT, "oft_block_size": 16, **changes})
    assert result.code == 0, result.text
    return result


def test_oft_target_holds_where_lora_target_says_something_else(pretrained: Result) -> None:
    adapted = {key.split(".oft_R")[0] for key in tensors(pretrained.output) if "oft_R" in key}
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj", "down_proj"}
    assert len(adapted) == 8
    expected = "`oft_target: q_proj,down_proj` and `lora_target: v_proj` differ: oft_target holds"
    assert expected in messages(pretrained)
    assert f"oft: {expected}" in pretrained.text


def test_the_evaluation_has_a_loss(pretrained: Result) -> None:
    state = json.loads((pretrained.output / "trainer_state.json").read_text())
    losses = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_the_adapter_and_the_modules_beside_it_are_saved_whole(pretrained: Result) -> None:
    verdict = pretrained.report["ranks"][0]["adapter"]
    assert (verdict["ok"], verdict["tensors"]) == (True, 9)
    assert {entry["ok"] for entry in verdict["checkpoints"].values()} == {True}
    assert pretrained.report["ranks"][0]["gradients"]["problems"] == []
    base = load_file(
        Path(json.loads((pretrained.output / "adapter_config.json").read_text())["base_model_name_or_path"])
        / "model.safetensors"
    )
    head = tensors(pretrained.output)["base_model.model.lm_head.weight"]
    assert not torch.equal(head, base["lm_head.weight"])


def test_a_resumed_run_is_the_same_run(train: Train, pretrained: Result) -> None:
    resumed = train(**PRETRAINING, resume_from_checkpoint=str(pretrained.output / "checkpoint-2"))
    assert resumed.code == 0, resumed.text
    assert resumed.losses == pretrained.losses
    assert resumed.grad_norms == pretrained.grad_norms
    after, before = tensors(resumed.output), tensors(pretrained.output)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_fine_tuning_goes_on_with_the_pretrained_adapter(pretrained: Result, finetuned: Result) -> None:
    before, after = tensors(pretrained.output), tensors(finetuned.output)
    assert before.keys() == after.keys()
    rotations = [key for key in before if "oft_R" in key]
    assert max(float(before[key].abs().max()) for key in rotations) > RATE
    moved = [float((after[key] - before[key]).abs().max()) for key in before]
    assert min(moved) > 0 and max(moved) <= 2 * RATE / 100 + 1e-6  # two steps of Adam, and not from zero
    assert (
        f"`oft_block_size: 16` has no effect: the training of {pretrained.output} goes on with 8. "
        "`create_new_adapter: true` merges it and trains a new one"
    ) in messages(finetuned)


def test_the_exported_model_computes_what_the_adapter_does(
    assets: Path, tmp_path: Path, finetuned: Result
) -> None:
    """`finetuning_type` is LoRA's here, with which stock merges an OFT adapter without a word."""
    from peft import PeftModel

    recipe = {
        "model_name_or_path": str(assets / "qwen2"),
        "adapter_name_or_path": str(finetuned.output),
        "template": "default",
        "finetuning_type": "lora",
        "infer_dtype": "float32",
        "export_dir": str(tmp_path / "merged"),
    }
    (tmp_path / "export.yaml").write_text(yaml.safe_dump(recipe))
    command = [str(BIN / "llamafactory-cli"), "export", str(tmp_path / "export.yaml")]
    done = subprocess.run(command, env=environment(npu=False), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{finetuned.output} is an OFT adapter and is loaded as one" in done.stderr
    assert f"{finetuned.output}: merging rotations with ||RR'-I||/||I|| up to " in done.stderr
    adapted = PeftModel.from_pretrained(load(assets / "qwen2"), finetuned.output).eval()
    models = {"merged": load(tmp_path / "merged").eval(), "base": load(assets / "qwen2").eval()}
    with torch.no_grad():
        expected = adapted(input_ids=IDS).logits
        apart = {
            name: float((model(input_ids=IDS).logits - expected).abs().max())
            for name, model in models.items()
        }
    assert apart["merged"] < 1e-4
    assert apart["base"] > 1e-2


def test_two_ranks_with_the_defaults_of_stock(train: Train) -> None:
    """Stock, with `ddp_find_unused_parameters: true`: `Expected to mark a variable ready only once`."""
    recipe = {"model": "qwen25vl", "template": "qwen2_vl", "dataset": "tiny_mm", **OFT}
    ours = train(**recipe, ranks=2, max_steps=2)
    assert ours.code == 0, ours.text
    assert ours.report["decisions"]["ddp_find_unused_parameters"]["choice"] == "False"
    adapted = {key.split(".oft_R")[0] for key in tensors(ours.output)}
    assert len(adapted) == 7 * 4  # every linear layer of the text, by the defaults
    assert not [name for name in adapted if "visual" in name]  # freeze_vision_tower
    assert check(ours.output).problems == ()


def test_fsdp2_on_two_ranks(train: Train) -> None:
    config = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"],
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": True,
    }
    result = train(
        **OFT,
        ranks=2,
        command=torchrun(2),
        fsdp="full_shard auto_wrap",
        fsdp_config=config,
        oft_target="q_proj,in_proj_qkv",
        ascend={"kernels": "off"},
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
    )
    assert result.code == 0, result.text
    for folder in (result.output, result.output / "checkpoint-1"):
        verdict = check(folder)
        assert (verdict.problems, verdict.tensors) == ((), 4), folder
        assert verdict.orthogonality_error is not None and verdict.orthogonality_error < 1e-5
    assert result.report["ranks"][1]["sharding"]["modules"] > 4
