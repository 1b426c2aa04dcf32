"""Runs flash-linear-attention's Ascend kernels in Triton's interpreter on the CPU; prints distances as JSON.

    TRITON_INTERPRET=1 python -m tests.kernels.fla_worker

Called as the plugin calls them. Distances are relative L2 against the float64 recurrence on the same, rounded
inputs, of the output and the gradient of every input; against an output 1.1 times as large for the control.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from tests.kernels import interpreter, pretended_npu
from tests.kernels.reference import error, make_case, recurrent_gated_delta_rule

TOKENS, PACKED = 130, [0, 50, 130]  # two whole chunks and a rest; samples that end inside a chunk
RULE = ("output", "query", "key", "value", "g", "beta")
CASES: dict[str, dict[str, Any]] = {
    "model_float32": {"kind": "model", "dtype": torch.float32, "seed": 1},
    "slow_packed_float32": {"kind": "slow", "dtype": torch.float32, "cu_seqlens": PACKED},
    "model_bfloat16": {"kind": "model", "dtype": torch.bfloat16},
}


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


def compare_rule(
    kind: str, dtype: torch.dtype, cu_seqlens: list[int] | None = None, seed: int = 0
) -> dict[str, float]:
    """Return the distances; two value heads share a key head, and g stays float32, as in the models."""
    from llamafactory_ascend.kernels.fla import gated_delta_rule

    case = make_case(kind, 1, TOKENS, key_heads=1, value_heads=2, key_dim=128, value_dim=128, seed=seed)
    inputs = [x if x is case.g else x.to(dtype) for x in case[:5]]
    d_output = case.d_output.to(dtype)
    exact = [x.double() for x in inputs]  # its gradients are not rounded either
    lengths = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    actual = results(
        lambda *x: gated_delta_rule(*x, use_qk_l2norm_in_kernel=True, cu_seqlens=lengths)[0], inputs, d_output
    )
    expected = results(lambda *x: recurrent_gated_delta_rule(*x, cu_seqlens=cu_seqlens)[0], exact, d_output)
    found = dict(zip(RULE, map(error, actual, expected), strict=True))
    return {**found, "control": error(1.1 * actual[0], expected[0])}


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

    pretended_npu.take_cpu_tensors()
    kernels = record()
    rule = {name: compare_rule(**case) for name, case in CASES.items()}
    rule_kernels = dict(kernels)
    kernels.clear()
    convolution = {str(dtype)[6:]: compare_convolution(dtype) for dtype in (torch.float32, torch.bfloat16)}
    print(
        json.dumps(
            {
                "version": fla.__version__,
                "rule": rule,
                "rule_kernels": rule_kernels,
                "convolution": convolution,
                "convolution_kernels": kernels,
            }
        )
    )


if __name__ == "__main__":
    main()
