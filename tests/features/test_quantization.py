"""bitsandbytes on an NPU is refused, whether the recipe asks for it or the model was saved with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from llamafactory_ascend.features.quantization import judge, method_of


@pytest.mark.parametrize(
    ("bits", "method", "saved"), [(4, "bnb", ""), (8, "bnb", ""), (None, "bnb", "bitsandbytes")]
)
def test_bitsandbytes_is_refused_unless_allowed(bits: int | None, method: str, saved: str) -> None:
    (finding,) = judge(bits, method, saved, allowed=False)
    assert finding.level == "error" and "abnormal loss" in finding.message
    assert "`ascend: {allow: [bitsandbytes]}`" in finding.message
    (finding,) = judge(bits, method, saved, allowed=True)
    assert finding.level == "warning" and "compare the loss" in finding.message


def test_other_methods_are_left_to_the_host() -> None:
    assert judge(4, "hqq", "", allowed=False) == []
    assert judge(None, "bnb", "", allowed=False) == []
    assert judge(4, "bnb", "gptq", allowed=False) == []  # the host ignores `quantization_bit` for these


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": None}, ""),
        ({}, ""),
        ([], ""),
    ],
)
def test_method_of_a_folder(tmp_path: Path, config: Any, method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert method_of(tmp_path) == method
    assert method_of(tmp_path / "Qwen/Qwen3-8B") == ""
