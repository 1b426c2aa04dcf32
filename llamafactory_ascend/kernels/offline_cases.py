"""What the offline check computes: random tensors for each operator, awkward on purpose, and its call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llamafactory_ascend.kernels import references

Tensors = Mapping[str, Tensor]
EPS = 1e-6
FULL = "[1, 4096, 48, 128]"  # the rule of a layer of Qwen3.5-27B: [rows, tokens, value heads, width]


@dataclass(frozen=True)
class Case:
    """One input of one operator.

    Attributes:
        name: what is awkward about it.
        form: of ``forms.FORMS``, through which models call the operator.
        tensors: by name, float32 on the CPU; their gradients are compared too.
        call: (function in that form, tensors) -> outputs.
        reference: tensors in float64 -> outputs.
        wide: names of tensors that stay in float32 whatever the dtype.
        constants: names of tensors that no gradient flows to.
        bounds: cumulative lengths of the samples packed into the row; None: rows are samples.
    """

    operator: str
    name: str
    form: str
    tensors: Tensors
    call: Callable[[Callable[..., Any], Tensors], tuple[Tensor, ...]]
    reference: Callable[[Tensors], tuple[Tensor, ...]]
    wide: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    bounds: tuple[int, ...] | None = None


def all_cases() -> list[Case]:
    """Return the cases, always the same ones."""
    return [*_rule_cases(), *_convolution_cases(), *_norm_cases(), *_rope_cases(), _swiglu_case()]


def _generator(seed: int) -> Callable[..., Tensor]:
    return partial(torch.randn, generator=torch.Generator().manual_seed(seed))


# ---- the gated delta rule
def rule_tensors(
    rows: int, tokens: int, key_heads: int, value_heads: int, width: int, seed: int = 0
) -> dict[str, Tensor]:
    """Return random inputs, decaying as Qwen3.5 initialises it."""
    randn = _generator(seed)
    rate = 16 * torch.rand(value_heads, generator=torch.Generator().manual_seed(seed))
    return {
        "query": randn(rows, tokens, key_heads, width),
        "key": randn(rows, tokens, key_heads, width),
        "value": randn(rows, tokens, value_heads, width),
        "g": -rate * F.softplus(randn(rows, tokens, value_heads) + 1),
        "beta": torch.sigmoid(randn(rows, tokens, value_heads)),
    }


def rule_case(name: str, tensors: Tensors, bounds: tuple[int, ...] | None = None) -> Case:
    def call(function: Callable[..., Any], given: Tensors) -> tuple[Tensor, ...]:
        query, key, value = (given[name] for name in ("query", "key", "value"))
        output = function(query, key, value, g=given["g"], beta=given["beta"], use_qk_l2norm_in_kernel=True)
        return (output[0],)

    def reference(given: Tensors) -> tuple[Tensor, ...]:
        return (references.gated_delta_rule(**given, bounds=bounds),)

    return Case("gated_delta_rule", name, "delta_rule", tensors, call, reference, wide=("g",), bounds=bounds)


def full_size() -> Case:
    """Return the rule at the size of FULL, sixteen key heads."""
    return rule_case(FULL, rule_tensors(1, 4096, 16, 48, 128))


def _rule_cases() -> list[Case]:
    found = [
        rule_case("2 rows of 200 tokens", rule_tensors(2, 200, 2, 2, 128)),
        rule_case("1 token", rule_tensors(2, 1, 2, 2, 64)),
        rule_case("3 value heads a key head", rule_tensors(2, 130, 2, 6, 64)),
    ]
    padded = rule_tensors(2, 130, 2, 2, 64)
    for name in ("query", "key", "value"):  # Transformers zeroes what goes into the layer at padded places
        padded[name][1] = 0
        padded[name][0, 90:] = 0
    found.append(rule_case("a row of padding", padded))
    strong = rule_tensors(2, 130, 2, 2, 64)
    strong["g"] = -30 - 100 * torch.rand(strong["g"].shape, generator=torch.Generator().manual_seed(1))
    found.append(rule_case("strong decay", strong))
    same = rule_tensors(2, 130, 2, 2, 64)
    same["key"] = same["key"][:1, :1] + 1e-3 * same["key"]
    same["g"], same["beta"] = 1e-6 * same["g"], torch.full_like(same["beta"], 0.999)
    found.append(rule_case("near-identical keys", same))
    bounds = (0, 40, 41, 150, 278)  # less than a chunk, one token, ragged, two chunks
    found.append(rule_case("packed samples", rule_tensors(1, 278, 2, 2, 64), bounds))
    return found


# ---- its convolution
def _convolution_cases() -> list[Case]:
    randn = _generator(1)
    rows, packed, padded = randn(2, 70, 48), randn(1, 70, 48), randn(2, 70, 48)
    padded[1], padded[0, 50:] = 0, 0
    weight, bias = randn(48, 4), randn(48)
    return [
        _convolution("2 rows of 70 tokens", {"x": rows, "weight": weight}),
        _convolution("with a bias", {"x": rows, "weight": weight, "bias": bias}),
        _convolution("2 tokens", {"x": rows[:, :2].clone(), "weight": weight}),
        _convolution("a row of padding", {"x": padded, "weight": weight}),
        _convolution("packed samples", {"x": packed, "weight": weight}, (0, 2, 3, 40, 70)),
    ]


def _convolution(name: str, tensors: Tensors, bounds: tuple[int, ...] | None = None) -> Case:
    def call(function: Callable[..., Any], given: Tensors) -> tuple[Tensor, ...]:
        output: Tensor = function(given["x"].transpose(1, 2), given["weight"], given.get("bias"), "silu")
        return (output.transpose(1, 2),)

    def reference(given: Tensors) -> tuple[Tensor, ...]:
        return (references.causal_conv1d(**given, bounds=bounds),)

    return Case("causal_conv1d", name, "convolution", tensors, call, reference, bounds=bounds)


# ---- what torch_npu fuses
def _norm_cases() -> list[Case]:
    randn = _generator(2)
    tensors = {"x": randn(2, 37, 128), "weight": 1 + 0.3 * randn(128)}
    around_zero = {**tensors, "weight": 0.3 * randn(128)}
    gated = {"x": tensors["x"], "gate": randn(2, 37, 128), "weight": tensors["weight"]}
    padded = {"x": tensors["x"].clone(), "weight": tensors["weight"]}
    padded["x"][1] = 0
    return [
        _norm("rms_norm", "2 rows of 37 tokens", tensors),
        _norm("rms_norm", "a row of padding", padded),
        _norm("rms_norm_1p", "2 rows of 37 tokens", around_zero),
        _norm("rms_norm_gated", "2 rows of 37 tokens", gated),
    ]


def _norm(operator: str, name: str, tensors: Tensors) -> Case:
    formula: Callable[..., Tensor] = getattr(references, operator)

    def call(function: Callable[..., Any], given: Tensors) -> tuple[Tensor, ...]:
        module = SimpleNamespace(weight=given["weight"], eps=EPS)
        return (function(module, *(given[key] for key in ("x", "gate") if key in given)),)

    def reference(given: Tensors) -> tuple[Tensor, ...]:
        return (formula(**given, eps=EPS),)

    form = "norm_gated" if operator == "rms_norm_gated" else "norm"
    return Case(operator, name, form, tensors, call, reference)


def _rope_cases() -> list[Case]:
    return [_rope("whole heads of 64", 64), _rope("the first 16 of 64 channels", 16)]


def _rope(name: str, channels: int) -> Case:
    randn = _generator(3)
    angles = 3 * randn(2, 37, channels // 2)
    angles = torch.cat([angles, angles], -1)
    tensors = {
        "query": randn(2, 4, 37, 64),
        "key": randn(2, 2, 37, 64),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }

    def call(function: Callable[..., Any], given: Tensors) -> tuple[Tensor, ...]:
        query, key = function(given["query"], given["key"], given["cos"], given["sin"])
        return query, key

    def reference(given: Tensors) -> tuple[Tensor, ...]:
        cos, sin = given["cos"][:, None], given["sin"][:, None]
        return references.rope(given["query"], cos, sin), references.rope(given["key"], cos, sin)

    return Case("rope", name, "rope", tensors, call, reference, constants=("cos", "sin"))


def _swiglu_case() -> Case:
    randn = _generator(4)

    def call(function: Callable[..., Any], given: Tensors) -> tuple[Tensor, ...]:
        return (function(None, given["gate"], given["up"]),)

    def reference(given: Tensors) -> tuple[Tensor, ...]:
        return (references.swiglu(given["gate"], given["up"]),)

    tensors = {"gate": randn(2, 37, 96), "up": randn(2, 37, 96)}
    return Case("swiglu", "2 rows of 37 tokens", "mlp", tensors, call, reference)
