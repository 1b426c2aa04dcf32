"""Which attention each part of a model runs, and the version of Transformers whose flash attention fails."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.integrations.flash_attention import flash_attention_forward

from llamafactory_ascend.features.attention import BROKEN_FLASH_ATTENTION, components, judge


@pytest.mark.parametrize("version", ["5.5.4", "5.6.1", "5.6.2", "5.8.0"])
def test_fa2_passes_where_it_works(version: str) -> None:
    assert judge("fa2", version) == []


def test_fa2_is_refused_where_it_fails() -> None:
    (finding,) = judge("fa2", "5.6.0")
    assert finding.level == "error" and "write `flash_attn: sdpa`" in finding.message
    for other in ("auto", "sdpa", "disabled"):
        assert judge(other, "5.6.0") == []


def test_the_list_of_broken_versions_is_right_about_this_one() -> None:
    """Stock: without attention sinks the call ends before any kernel is asked."""
    q = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    module.config = SimpleNamespace(_attn_implementation="flash_attention_2")  # type: ignore[assignment]
    with pytest.raises(Exception) as caught:
        flash_attention_forward(module, q, q, q, None, s_aux=None)
    fails_at_the_sinks = "'NoneType' object has no attribute 'to'" in str(caught.value)
    assert fails_at_the_sinks is (transformers.__version__ in BROKEN_FLASH_ATTENTION)


@pytest.mark.parametrize("chosen", ["sdpa", "eager"])
def test_components(assets: Path, chosen: str) -> None:
    config = transformers.AutoConfig.from_pretrained(assets / "qwen3_5", attn_implementation=chosen)
    assert components(config) == {"text": chosen, "vision": chosen}
    config = transformers.AutoConfig.from_pretrained(assets / "qwen3", attn_implementation=chosen)
    assert components(config) == {"text": chosen}


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_an_additive_mask_reaches_the_npu_as_the_boolean_one_it_takes(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers does it; that nothing is left to convert is why there is no code of ours for it."""
    from transformers.integrations import sdpa_attention

    if device == "npu" and not hasattr(torch, "npu"):
        pytest.skip("no simulated NPU")
    monkeypatch.setattr(sdpa_attention, "_is_torch_npu_available", device == "npu")
    seen = []
    stock = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *a, **k: (seen.append(k["attn_mask"]), stock(*a, **k))[1],
    )
    allowed = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0)).to(device)
    out, _ = sdpa_attention.sdpa_attention_forward(torch.nn.Module(), q, q, q, mask.to(device))
    expected = stock(q.cpu(), q.cpu(), q.cpu(), attn_mask=allowed).transpose(1, 2)
    assert seen[0].dtype == (torch.bool if device == "npu" else torch.float32)
    torch.testing.assert_close(out.cpu(), expected)
