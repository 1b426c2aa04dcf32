"""Which of the host's patterns reached what, and how large it is."""

import pytest
import torch
from peft import LoraConfig, OFTConfig, get_peft_model
from torch import nn

from llamafactory_ascend.features.targets.adapted import Adapted, by_pattern, size, surprises, tied

TEXT, VISION = "model.language_model.layers.2", "model.visual.blocks"


def adapted(*paths: str, kind: str = "Linear") -> Adapted:
    return Adapted(dict.fromkeys(paths, kind), {}, 0)


@pytest.mark.parametrize(
    ("paths", "patterns", "found"),
    [
        ([f"{TEXT}.q_proj", f"{VISION}.2.proj"], ["proj"], {"proj": [0, 1]}),
        # PEFT compares whole ends: q_proj is what put the first there
        ([f"{TEXT}.q_proj", f"{VISION}.2.proj"], ["proj", "q_proj"], {"proj": [1], "q_proj": [0]}),
        ([f"{VISION}.2.qkv", f"{VISION}.20.qkv"], ["blocks.2"], {"blocks.2": [0, 1]}),
        ([f"{TEXT}.q_proj"], ["all"], {"all": [0]}),
        ([f"{TEXT}.q_proj"], ["q_proj", "q_porj"], {"q_proj": [0], "q_porj": []}),
    ],
)
def test_pattern(paths: list[str], patterns: list[str], found: dict[str, list[int]]) -> None:
    expected = {pattern: [paths[index] for index in places] for pattern, places in found.items()}
    assert by_pattern(adapted(*paths), patterns) == expected


@pytest.mark.parametrize(
    ("model", "patterns", "said"),
    [
        (adapted(f"{TEXT}.q_proj", f"{TEXT}.v_proj"), ["q_proj", "v_proj"], []),
        (adapted(f"{TEXT}.q_proj", f"{VISION}.2.attn.qkv"), ["all"], []),
        (
            adapted(f"{TEXT}.mlp.up_proj", f"{VISION}.2.mlp.up_proj"),
            ["up_proj"],
            ["1 modules of text and 1 modules of vision"],
        ),
        (adapted(f"{VISION}.2.attn.qkv"), ["blocks.2.attn"], []),
        (
            adapted(f"{VISION}.2.attn.qkv", f"{VISION}.20.attn.qkv"),
            ["blocks.2"],
            ["1 modules that have it as a part of another"],
        ),
        (adapted(f"{TEXT}.linear_attn.in_proj_qkv"), ["qkv"], ["another name (in_proj_qkv, e.g."]),
        (
            adapted(f"{TEXT}.q_proj"),
            ["q_proj", "q_porj"],
            ["`lora_target: q_porj` adapts nothing of its own"],
        ),
        (adapted("model.visual.merger.mlp.0"), ["mlp.0"], ["1 modules that are no named linear layer"]),
        (adapted("model.visual.patch_embed.proj", kind="Conv3d"), ["proj"], ["patch_embed.proj (Conv3d)"]),
    ],
)
def test_surprises(model: Adapted, patterns: list[str], said: list[str]) -> None:
    found = surprises(model, by_pattern(model, patterns), "lora_target")
    assert [part in sentence for part, sentence in zip(said, found, strict=True)] == [True] * len(said)


class Params4bit(nn.Parameter):
    """As bitsandbytes stores it: two numbers in a byte, any dtype as storage."""

    quant_storage = torch.uint8


def test_size() -> None:
    assert size(nn.Parameter(torch.zeros(3, 4))) == 12
    packed = Params4bit(torch.zeros(6, dtype=torch.uint8), requires_grad=False)
    assert size(packed) == 12
    packed.quant_storage = torch.bfloat16
    assert size(packed) == 24
    gathered_elsewhere = nn.Parameter(torch.zeros(0))
    gathered_elsewhere.ds_numel = 12  # type: ignore[attr-defined]
    assert size(gathered_elsewhere) == 12


class Tied(nn.Module):
    """Embeddings and a head with one weight; the layer between has its own."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.embed_tokens, self.layer, self.lm_head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)
        if shared:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lm_head(self.layer(self.embed_tokens(ids)))
        return found


@pytest.mark.parametrize("kind", ["lora", "oft"])
@pytest.mark.parametrize("shared", [True, False])
def test_an_adapter_on_a_tied_head_is_said_because_merging_breaks_it(kind: str, shared: bool) -> None:
    torch.manual_seed(0)
    chosen = ["layer", "lm_head"]
    config = (
        LoraConfig(r=2, target_modules=chosen, init_lora_weights=False)
        if kind == "lora"
        else OFTConfig(oft_block_size=4, target_modules=chosen, init_weights=False)
    )
    model = get_peft_model(Tied(shared), config).eval()
    said = list(tied(model))
    assert [sentence.partition(":")[0] for sentence in said] == [
        "lm_head has an adapter and shares its weight with embed_tokens"
    ] * shared
    ids = torch.arange(12)
    before = model(ids)
    assert torch.allclose(model.merge_and_unload()(ids), before, atol=1e-5) == (not shared)
