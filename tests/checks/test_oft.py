"""OFT adapters judged from their files: rotations, blocks, and a configuration that says what they mean."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.oft.layer import OFTLayer, OFTRotationModule

from llamafactory_ascend.checks import oft
from llamafactory_ascend.checks.adapter import CONFIG, check
from tests.checks.test_adapter import build, damage, replace


def small(folder: Path, **changes: Any) -> Path:
    return build(folder, **{"oft_block_size": 4, "use_cayley_neumann": False, **changes})


def rewrite(adapter: Path, **changes: Any) -> Path:
    config = {**json.loads((adapter / CONFIG).read_text()), **changes}
    (adapter / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return adapter


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("size", [4, 32])
def test_the_error_is_that_of_pefts_own_rotations(exact: bool, size: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, size * (size - 1) // 2) * 0.1
    module = OFTRotationModule(7, weight.shape[1], size, 7 * size, use_cayley_neumann=not exact)
    rotation = module._cayley_batch(weight, size, not exact, 5)
    apart = (rotation @ rotation.mT - torch.eye(size)).flatten(1).norm(dim=1) / size**0.5
    error = oft.orthogonality_error(weight, {"use_cayley_neumann": not exact})
    if exact:
        assert max(error, float(apart.max())) < 1e-6
    else:
        assert error == pytest.approx(float(apart.max()), rel=1e-4)
        assert error > 1e-4


def test_large_adapters_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 28) * 0.1
    whole = oft.orthogonality_error(weight, {})
    monkeypatch.setattr(oft, "ELEMENTS_AT_ONCE", 2 * 8 * 8)
    assert oft.orthogonality_error(weight, {}) == pytest.approx(whole)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_a_rotation_that_is_no_number_is_not_hidden(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three blocks; large weights are numbers, and their rotations are not."""
    weight = torch.zeros(3, 6)
    weight[1, 2] = bad
    for at_once in (oft.ELEMENTS_AT_ONCE, 1):
        monkeypatch.setattr(oft, "ELEMENTS_AT_ONCE", at_once)
        assert math.isnan(oft.orthogonality_error(weight, {"use_cayley_neumann": True}))
        assert math.isnan(oft.orthogonality_error(weight, {"use_cayley_neumann": False}))


def test_such_an_adapter_is_named(tmp_path: Path) -> None:
    end = "layers.1.mlp.down_proj.oft_R.weight"
    result = damage(small(tmp_path, use_cayley_neumann=True), replace(end, lambda r: r * 0 + 1e30))
    assert result.ok and result.orthogonality_error is not None and math.isnan(result.orthogonality_error)
    (warning,) = result.warnings
    assert "reaches nan" in warning and end in warning
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["orthogonality_error"] == "NaN"


@pytest.mark.parametrize("width", [16, 67, 1280, 3420])
def test_the_block_that_fits_is_pefts(width: int) -> None:
    for wanted in range(1, 130):
        assert oft.fitting(width, wanted) == OFTLayer.adjust_oft_parameters(None, width, wanted)  # type: ignore[arg-type]
    assert oft.fitting(3420, 32) == 30


def test_an_exact_adapter_is_whole_and_orthogonal(tmp_path: Path) -> None:
    result = check(small(tmp_path))
    assert (result.problems, result.warnings) == ((), ())
    assert result.orthogonality_error is not None and result.orthogonality_error < 1e-6
    assert check(build(tmp_path / "lora")).orthogonality_error is None


def test_a_series_that_is_no_rotation_is_a_warning(tmp_path: Path) -> None:
    adapter = small(tmp_path, use_cayley_neumann=True)
    assert check(adapter).warnings == ()  # small angles
    result = damage(adapter, replace("layers.2.mlp.down_proj.oft_R.weight", lambda r: r * 40))
    assert result.ok
    assert result.orthogonality_error is not None and result.orthogonality_error > 0.1
    (warning,) = result.warnings
    assert "reaches " in warning and "layers.2.mlp.down_proj.oft_R.weight" in warning


def test_blocks_of_another_size_than_the_config_says(tmp_path: Path) -> None:
    adapter = rewrite(small(tmp_path), oft_block_size=8)
    assert set(check(adapter).problems) == {
        "oft_R has blocks of 4, oft_block_size 8 gives 8 for 16 inputs: 8 of 12 modules, "
        "e.g. model.layers.0.self_attn.q_proj",
        "oft_R has blocks of 4, oft_block_size 8 gives 8 for 24 inputs: 4 of 12 modules, "
        "e.g. model.layers.0.mlp.down_proj",
    }


@pytest.mark.parametrize("changes", [{"oft_block_size": 5}, {"oft_block_size": 0, "r": 4}], ids=str)
def test_sizes_that_peft_adjusts_are_whole(tmp_path: Path, changes: dict[str, int]) -> None:
    """Of 16 inputs 5 becomes 4, of 24 it becomes 4 too; 4 blocks are 4 and 6 wide."""
    assert check(small(tmp_path, **changes)).problems == ()


def test_number_of_blocks(tmp_path: Path) -> None:
    adapter = rewrite(small(tmp_path, oft_block_size=0, r=4), r=2)
    assert "oft_R has 4 blocks, r 2 gives 2 for 16 inputs: 8 of 12 modules" in str(check(adapter).problems)


def test_blocks_of_one(tmp_path: Path) -> None:
    """As PEFT makes them for a width of 67, without a word."""
    adapter = damage(small(tmp_path), replace("q_proj.oft_R.weight", lambda r: torch.empty(16, 0)))
    assert adapter.problems[0].startswith("oft_R has blocks of 1 x 1, which rotate nothing")
    assert "4 of 12 modules" in adapter.problems[0]


def test_more_than_a_matrix(tmp_path: Path) -> None:
    result = damage(small(tmp_path), replace("q_proj.oft_R.weight", lambda r: r[None]))
    assert result.problems[0].startswith("oft_R has shape [1, 4, 6], it must be a matrix: 4 of 12 modules")


def test_width_from_the_base_models_config_alone(tmp_path: Path) -> None:
    adapter = small(tmp_path)
    (tmp_path / "base" / "model.safetensors").unlink()
    result = damage(adapter, replace("q_proj.oft_R.weight", lambda r: r[:3]))
    assert result.problems[0].startswith(
        "oft_R covers 12 inputs, the base model's hidden_size is 16: 4 of 12"
    )


def test_nan_one_layer_gone_and_nothing_learned(tmp_path: Path) -> None:
    gone = damage(
        small(tmp_path / "gone"),
        lambda t: {k: v for k, v in t.items() if "layers.1.self_attn.v_proj" not in k},
    )
    assert "1 targets of adapter_config.json have no tensor in the file" in gone.problems[0]
    broken = damage(
        small(tmp_path / "nan"), replace("layers.3.mlp.down_proj.oft_R.weight", lambda r: r * torch.nan)
    )
    assert broken.problems[0].startswith("1 tensors hold NaN or infinity")
    assert broken.orthogonality_error is None
    zero = damage(small(tmp_path / "zero"), replace("oft_R.weight", torch.zeros_like))
    assert zero.problems[0].startswith("all 12 tensors that start at zero are still zero")


@pytest.mark.parametrize(
    ("changes", "installed", "words"),
    [
        ({}, "0.18.1", ""),
        ({"use_cayley_neumann": True}, "0.18.1", ""),
        ({"peft_version": "0.17.1"}, "0.18.1", ""),  # exact: the same in every version that knows the key
        ({"peft_version": "0.18.2.dev0@UNKNOWN"}, "0.18.1", ""),
        ({"use_cayley_neumann": True, "peft_version": "0.17.1"}, "0.18.1", "is of PEFT 0.17.1 below 0.18"),
        (
            {"use_cayley_neumann": True, "peft_version": ...},
            "0.18.1",
            "names no peft_version, so it is of a PEFT",
        ),
        ({"peft_version": "0.19.0"}, "0.18.1", "is of PEFT 0.19.0, but 0.18.1 is installed"),
        ({"peft_version": "0.19.0"}, "", ""),
        ({"use_cayley_neumann": ...}, "0.18.1", "does not say use_cayley_neumann"),
        ({"oft_block_size": ...}, "0.18.1", "has no oft_block_size"),
    ],
    ids=str,
)
def test_what_the_configuration_must_say(changes: dict[str, Any], installed: str, words: str) -> None:
    config = {"peft_type": "OFT", "peft_version": "0.18.0", "use_cayley_neumann": False, "oft_block_size": 8}
    config = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    problems = oft.config_problems(config, installed)
    assert [words in problem for problem in problems] == [True] * bool(words)
    allowed = oft.config_problems(config, installed, any_version=True)
    assert len(allowed) == ("oft_block_size" not in config)
    assert oft.config_problems({**config, "peft_type": "LORA"}, installed) == []


def test_the_check_of_a_folder_reads_the_configuration(tmp_path: Path) -> None:
    result = check(rewrite(small(tmp_path), use_cayley_neumann=...))
    assert result.problems[0].startswith("adapter_config.json does not say use_cayley_neumann")
