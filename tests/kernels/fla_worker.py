"""Runs flash-linear-attention's Ascend kernels in Triton's interpreter on the CPU; prints distances as JSON.

    TRITON_INTERPRET=1 python -m tests.kernels.fla_worker

Called as the plugin calls them. Distances are relative L2 against the float64 recurrence on the same, rounded
inputs, of the output and the gradient of every input. Transformers' rule is measured beside them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from tests.kernels import interpreter, pretended_npu
from tests.kernels.reference import error, make_case, recurrent_gated_delta_rule

RULE = ("output", "query", "key", "value", "g", "beta")


def record() -> dict[str, str]:
    """Note every kernel that is launched from now on: name -> module."""
    kernels: dict[str, str] = {}
    plain = InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernels[self.fn.__name__] = self.fn.__module__
        return plain(self, *args, **kwargs)

    InterpretedFunction.run = run
    return kernels


def results(function: Callable[..., Tensor], inputs: list[Tensor], d_output: Tensor) -> list[Tensor]:
    """Return output and input gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, d_output.to(output.dtype))]


@dataclass(frozen=True)
class Case:
    """Inputs of the rule, 128 channels; g stays float32 whatever `dtype`, as in the models."""

    kind: str
    dtype: torch.dtype
    tokens: int = 130  # two whole chunks and a rest
    key_heads: int = 1
    value_heads: int = 2
    cu_seqlens: tuple[int, ...] | None = None
    seed: int = 0


CASES = {
    # Whole chunks of moderate decay, a key head for each value head: the inputs the bounds are stated for.
    "moderate_float32": Case("moderate", torch.float32, tokens=256, key_heads=2),
    "moderate_bfloat16": Case("moderate", torch.bfloat16, tokens=256, key_heads=2),
    # Heads that decay by e^-23 and e^-14 a token, on average.
    "model_float32": Case("model", torch.float32, seed=1),
    "model_bfloat16": Case("model", torch.bfloat16),
    # The samples end inside a chunk.
    "slow_packed_float32": Case("slow", torch.float32, cu_seqlens=(0, 50, 130)),
}


def compare_rule(rule: Callable[..., Any], case: Case) -> dict[str, float]:
    """Return the distances, and two figures more.

    `control` is the distance of an output 1.1 times as large. `g_of_terms` is the error of the gradient of g
    over the norm of <output, d_output>: chunked rules calculate that gradient as differences of such terms,
    so this is their rounding, however little is left of the difference.
    """
    sizes = (1, case.tokens, case.key_heads, case.value_heads, 128, 128)
    plain = make_case(case.kind, *sizes, seed=case.seed)
    inputs = [x if x is plain.g else x.to(case.dtype) for x in plain[:5]]
    d_output = plain.d_output.to(case.dtype)
    exact = [x.double() for x in inputs]  # its gradients are not rounded either
    bounds = None if case.cu_seqlens is None else list(case.cu_seqlens)
    how = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    actual = results(lambda *x: rule(*x, use_qk_l2norm_in_kernel=True, **how)[0], inputs, d_output)
    expected = results(lambda *x: recurrent_gated_delta_rule(*x, cu_seqlens=bounds)[0], exact, d_output)
    terms = (expected[0] * d_output).sum(-1)
    return {
        **dict(zip(RULE, map(error, actual, expected), strict=True)),
        "control": error(1.1 * actual[0], expected[0]),
        "g_of_terms": ((actual[4] - expected[4]).norm() / terms.norm()).item(),
    }


def stock_rule(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Transformers' own, called as its layer does."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    query, key = (x.repeat_interleave(value.shape[2] // x.shape[2], 2) for x in (query, key))
    return torch_chunk_gated_delta_rule(query, key, value, *args, **kwargs)


def compare_convolution(dtype: torch.dtype) -> dict[str, float]:
    """Two samples of 20 and 50 tokens, 64 channels, four taps, SiLU."""
    from llamafactory_ascend.kernels import varlen
    from llamafactory_ascend.kernels.fla import causal_conv1d

    generator = torch.Generator().manual_seed(0)
    x, weight, d_output = (
        torch.randn(shape, generator=generator) for shape in ((1, 70, 64), (64, 4), (1, 70, 64))
    )
    x, weight, d_output = x.to(dtype), weight.to(dtype), d_output.to(dtype)
    bounds = [0, 20, 70]
    sequences = varlen.of(torch.cat([torch.arange(20), torch.arange(50)])[None], None, 1, 70)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        parts = [x[:, start:stop].transpose(1, 2) for start, stop in pairwise(bounds)]
        convolved = [
            torch.nn.functional.conv1d(part, weight[:, None], padding=3, groups=64)[..., : part.shape[2]]
            for part in parts
        ]
        return torch.nn.functional.silu(torch.cat(convolved, 2).transpose(1, 2))

    actual = results(
        lambda x, w: causal_conv1d(x, w, None, "silu", sequences=sequences), [x, weight], d_output
    )
    expected = results(reference, [x.double(), weight.double()], d_output)
    return dict(zip(("output", "x", "weight"), map(error, actual, expected), strict=True))


def main() -> None:
    interpreter.complete()
    pretended_npu.pretend()
    import fla

    from llamafactory_ascend.kernels.fla import gated_delta_rule

    pretended_npu.take_cpu_tensors()
    kernels = record()
    rule = {name: compare_rule(gated_delta_rule, case) for name, case in CASES.items()}
    rule_kernels = dict(kernels)
    kernels.clear()
    convolution = {str(dtype)[6:]: compare_convolution(dtype) for dtype in (torch.float32, torch.bfloat16)}
    print(
        json.dumps(
            {
                "version": fla.__version__,
                "rule": rule,
                "stock_rule": compare_rule(stock_rule, CASES["model_float32"]),
                "rule_kernels": rule_kernels,
                "convolution": convolution,
                "convolution_kernels": kernels,
            }
        )
    )


if __name__ == "__main__":
    main()
