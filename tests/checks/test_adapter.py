"""Adapters made by PEFT from a tiny model, then damaged: each damage has a reason of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llamafactory_ascend.checks.adapter import CONFIG, WEIGHTS, AdapterCheck, check

HIDDEN, LAYERS, RANK = 16, 4, 4
Tensors = dict[str, torch.Tensor]


def base_config(**changes: Any) -> Any:
    from transformers import Qwen3Config

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": LAYERS, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return Qwen3Config(**{**sizes, **heads, **changes})


def build(folder: Path, keep_base: bool = True, train: bool = True, **lora: Any) -> Path:
    """Save a base model and an adapter on it as a training would leave them."""
    from peft import LoraConfig, OFTConfig, get_peft_model
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(base_config())
    base = folder / "base"
    if keep_base:
        model.save_pretrained(base)
    else:
        base.mkdir(parents=True)
    kind = OFTConfig if "oft_block_size" in lora else LoraConfig
    settings = {"target_modules": ["q_proj", "v_proj", "down_proj"]} | lora
    if kind is LoraConfig:
        settings = {"r": RANK} | settings
    peft = get_peft_model(model, kind(**settings))
    if train:
        with torch.no_grad():
            for parameter in peft.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.01)
    adapter = folder / "adapter"
    peft.save_pretrained(adapter)
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return adapter


def damage(adapter: Path, change: Callable[[Tensors], Tensors]) -> AdapterCheck:
    tensors = change(load_file(adapter / WEIGHTS))
    save_file(tensors, adapter / WEIGHTS)
    return check(adapter)


def replace(end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        key: change(tensor).contiguous() if key.endswith(end) else tensor for key, tensor in tensors.items()
    }


@pytest.fixture(params=[True, False], ids=["base", "no base"])
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A whole adapter, with and without the base model's files beside it."""
    return build(tmp_path, keep_base=request.param)


def test_whole(adapter: Path) -> None:
    result = check(adapter)
    assert (result.ok, result.problems, result.warnings) == (True, (), ())
    assert result.tensors == 3 * 2 * LAYERS
    assert result.bytes == (adapter / WEIGHTS).stat().st_size
    assert len(result.sha256) == 64


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2}},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
        {"lora_bias": True},
        {"target_modules": "all-linear"},
        {"target_modules": r".*layers\.[01]\.self_attn\.(q|v)_proj"},
        {"layers_to_transform": [0, 3]},
        {"exclude_modules": ["v_proj"]},
        {"oft_block_size": 4},
        {"oft_block_size": 8, "block_share": True, "target_modules": ["q_proj"]},
        {"use_rslora": True, "init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_whole_in_every_form_that_peft_saves(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert check(build(tmp_path, **settings)).problems == ()


def test_half_height_lora_a(adapter: Path) -> None:
    result = damage(adapter, replace("lora_A.weight", lambda a: a[: RANK // 2]))
    assert result.problems == (
        "lora_A has 2 rows, the rank is 4: 12 of 12 modules, e.g. model.layers.0.mlp.down_proj",
    )


def test_empty_lora_b(adapter: Path) -> None:
    result = damage(adapter, replace("layers.2.self_attn.q_proj.lora_B.weight", lambda b: b[:0]))
    assert result.problems[0].startswith(
        "lora_B is empty (shape [0, 4]): 1 of 12 modules, e.g. model.layers.2."
    )


def test_flat_lora_b(adapter: Path) -> None:
    result = damage(adapter, replace("self_attn.q_proj.lora_B.weight", torch.flatten))
    assert result.problems == (
        "lora_B is no matrix (shape [64]): 4 of 12 modules, e.g. model.layers.0.self_attn.q_proj",
    )


def test_every_second_key(adapter: Path) -> None:
    result = damage(adapter, lambda tensors: {key: tensors[key] for key in sorted(tensors)[::2]})
    assert result.problems[0].startswith("lora_A without lora_B: 12 of 12 modules")


def test_second_half_of_the_keys(tmp_path: Path) -> None:
    adapter = build(tmp_path)
    result = damage(adapter, lambda t: {key: t[key] for key in sorted(t)[: len(t) // 2]})
    assert result.problems == (
        "6 targets of adapter_config.json have no tensor in the file, e.g. model.layers.2.mlp.down_proj",
    )


def test_one_module_gone_without_the_base_model(tmp_path: Path) -> None:
    adapter = build(tmp_path, keep_base=False)
    gone = "layers.1.self_attn.v_proj."
    result = damage(adapter, lambda t: {key: value for key, value in t.items() if gone not in key})
    assert result.problems == (
        "without v_proj, which other layers have: 1 of 11 layers, e.g. model.layers.1.self_attn",
    )


def test_one_target_gone_without_the_base_model(tmp_path: Path) -> None:
    adapter = build(tmp_path, keep_base=False)
    result = damage(adapter, lambda t: {key: value for key, value in t.items() if "v_proj" not in key})
    assert result.problems == ("1 targets of adapter_config.json have no tensor in the file, e.g. v_proj",)


def test_nan(adapter: Path) -> None:
    def poison(tensor: torch.Tensor) -> torch.Tensor:
        tensor[1, 1] = float("nan")
        return tensor

    result = damage(adapter, replace("layers.3.mlp.down_proj.lora_A.weight", poison))
    key = "base_model.model.model.layers.3.mlp.down_proj.lora_A.weight"
    assert result.problems == (f"1 tensors hold NaN or infinity, e.g. {key}",)


def test_all_b_zero(adapter: Path) -> None:
    result = damage(adapter, replace("lora_B.weight", torch.zeros_like))
    assert len(result.problems) == 1
    assert result.problems[0].startswith("all 12 tensors that start at zero are still zero, e.g. base_model.")


def test_all_b_zero_before_the_first_step(tmp_path: Path) -> None:
    adapter = build(tmp_path, train=False)
    assert not check(adapter).ok
    assert check(adapter, trained=False).ok


def test_some_b_zero_is_a_warning(adapter: Path) -> None:
    result = damage(adapter, replace("layers.0.mlp.down_proj.lora_B.weight", torch.zeros_like))
    assert result.ok
    assert result.warnings[0].startswith("1 of 12 tensors that start at zero are still zero")


def test_untrained_oft(tmp_path: Path) -> None:
    assert (
        "all 12 tensors that start at zero"
        in check(build(tmp_path, train=False, oft_block_size=4)).problems[0]
    )


def test_oft_block_of_no_size(tmp_path: Path) -> None:
    result = damage(build(tmp_path, oft_block_size=4), replace("oft_R.weight", lambda r: r[:, :5]))
    assert "oft_R has 5 columns, which is no block's n(n-1)/2: 12 of 12 modules" in result.problems[0]


def test_oft_half_of_the_blocks(tmp_path: Path) -> None:
    result = damage(build(tmp_path, oft_block_size=4), replace("q_proj.oft_R.weight", lambda r: r[:2]))
    assert result.problems[0].startswith("oft_R covers 8 inputs, the base model's layer has 16: 4 of 12")


def test_dora_magnitude_of_another_width(tmp_path: Path) -> None:
    adapter = build(tmp_path, use_dora=True)
    result = damage(adapter, replace("q_proj.lora_magnitude_vector", lambda m: m[:3]))
    assert result.problems[0].startswith("lora_magnitude_vector has shape [3], lora_B has 16 rows: 4 of 12")


def test_half_of_the_rows_of_lora_b(adapter: Path, tmp_path: Path) -> None:
    result = damage(adapter, replace("down_proj.lora_B.weight", lambda b: b[: HIDDEN // 2]))
    if (tmp_path / "base" / "config.json").exists():
        assert result.problems[0].startswith("lora_B writes 8, the base model's layer writes 16: 4 of 12")
    else:
        assert result.ok  # nothing on this machine says how wide the base model is


def test_width_from_the_base_models_config_alone(tmp_path: Path) -> None:
    adapter = build(tmp_path)
    (tmp_path / "base" / "model.safetensors").unlink()
    result = damage(adapter, replace("down_proj.lora_B.weight", lambda b: b[: HIDDEN // 2]))
    assert result.problems[0].startswith("lora_B writes 8, the base model's hidden_size is 16: 4 of 12")


def test_module_to_save_is_gone(tmp_path: Path) -> None:
    adapter = build(tmp_path, modules_to_save=["lm_head"])
    result = damage(adapter, lambda t: {key: value for key, value in t.items() if "lm_head" not in key})
    assert result.problems == ("modules_to_save names lm_head, of which the file holds nothing",)


def test_expectation_of_the_live_model(adapter: Path) -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in load_file(adapter / WEIGHTS).items()}
    assert check(adapter, shapes).ok
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    result = check(adapter, {**shapes, key: (32, RANK), "base_model.model.lm_head.weight": (40, HIDDEN)})
    assert result.problems == (
        "1 of the model's 25 adapter tensors are missing, e.g. base_model.model.lm_head.weight",
        f"1 tensors have another shape than the model's, e.g. {key}: [16, 4] instead of [32, 4]",
    )


def test_no_file(adapter: Path) -> None:
    (adapter / WEIGHTS).unlink()
    result = check(adapter)
    assert result.problems == (f"{adapter / WEIGHTS} is missing: no adapter was written",)
    assert (result.tensors, result.bytes, result.sha256) == (0, 0, "")


def test_no_config(adapter: Path) -> None:
    (adapter / CONFIG).unlink()
    assert check(adapter).problems == (
        f"{adapter / CONFIG} is missing or cannot be read: No such file or directory",
    )


@pytest.mark.parametrize("bytes_left", [0, 5, 40, -1])
def test_file_cut_off(adapter: Path, bytes_left: int) -> None:
    content = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(content[:bytes_left])
    result = check(adapter)
    assert not result.ok
    assert "cut off" in result.problems[0]


def test_no_tensor(adapter: Path) -> None:
    assert f"{adapter / WEIGHTS} holds no tensor" in damage(adapter, lambda tensors: {}).problems
