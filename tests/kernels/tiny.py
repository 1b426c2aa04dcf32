"""One tiny model for each family, built on the spot, and the choices that the tests substitute into it."""

from collections.abc import Iterable

import torch
import transformers
from torch import nn

from llamafactory_ascend.kernels.backends import BUILT_IN, Backend
from llamafactory_ascend.kernels.families import FAMILIES, Family
from llamafactory_ascend.kernels.operators import OPERATORS
from llamafactory_ascend.kernels.selection import Choice, Conditions, select
from llamafactory_ascend.kernels.substitution import Order, Substitutions, substitute
from tests.assets import models

SIZE = {**models.SMALL, "vocab_size": 64}
HYBRID = {**models.HYBRID, "vocab_size": 64}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# The towers of the tiny models lie beside their text model; both are built and neither is ever run whole.
VISION = dict(models.HYBRID_VISION)


def family(name: str) -> Family:
    return next(one for one in FAMILIES if one.name == name)


def build(name: str, seed: int = 0) -> nn.Module:
    """Return a model of a family with random weights, norms included, always the same."""
    torch.manual_seed(seed)
    model: nn.Module
    if name == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **{**SIZE, "num_hidden_layers": 2}, head_dim=16, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=32, mlp_only_layers=[0],
        )  # fmt: skip
        model = transformers.Qwen3MoeForCausalLM(config)
    elif name == "qwen3_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        text = {**SIZE, "head_dim": 16, "rope_parameters": rope}
        vision = {**VISION, "deepstack_visual_indexes": [0]}
        model = transformers.Qwen3VLForConditionalGeneration(
            transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
        )
    elif name == "qwen3_next":
        model = transformers.Qwen3NextForCausalLM(
            transformers.Qwen3NextConfig(**HYBRID, **EXPERTS, decoder_sparse_step=1)
        )
    elif name == "qwen3_5_text":
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**HYBRID))
    elif name == "qwen3_5_moe_text":
        text = {key: value for key, value in HYBRID.items() if key != "intermediate_size"}
        model = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**text, **EXPERTS))
    else:
        model = models.MODELS[{"qwen2_5_vl": "qwen25vl"}.get(name, name)]()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # a weight of ones, or of zeros, would hide that it is not used
            with torch.no_grad():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def choose(
    of: Family,
    wishes: dict[str, str],
    device_type: str = "cpu",
    packed: bool = False,
    more: Iterable[Backend] = (),
) -> dict[str, Choice]:
    """Return a choice for every operator; what has no wish stays as it is."""
    conditions = Conditions(device_type, "Ascend910B3" if device_type == "npu" else "CPU", packed)
    known = [*BUILT_IN, *more]
    return {name: select(name, wishes.get(name, "off"), known, of, conditions) for name in OPERATORS}


def put(
    model: nn.Module | None, of: Family, choices: dict[str, Choice], packed: bool = False
) -> tuple[Substitutions, list[str]]:
    """Substitute into a model; return what was done and the messages."""
    done, said = Substitutions(), list[str]()
    substitute(done, Order(of, choices, packed, said.append), model)
    return done, said
