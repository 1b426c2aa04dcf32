"""Compiles what a training step of a Qwen3.5 hybrid launches, and a kernel that must be rejected.

    make check-ascend-compile

To be run by the python of `environment.py`. No kernel is executed; the tensors are zeros and hold no result.
Progress goes to stderr; the last line of stdout is JSON. The exit code is 1 where a kernel does not compile,
or the one that is too wide does.
"""

import importlib.metadata
import json
import os
import sys
import warnings
from collections.abc import Callable

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # before torch: no device is wanted here

import torch
import triton
import triton.language as tl
from rich.console import Console
from torch import Tensor

from scripts.ascend_compile.compiler import Compiled
from scripts.ascend_compile.launches import Launches
from tests.kernels import pretended_npu

TOKENS, KEY_HEADS, VALUE_HEADS, WIDTH = 4096, 16, 32, 128  # a layer of Qwen3.5
TOO_WIDE = 2 * pretended_npu.UNIFIED_BUFFER // 4  # float32 numbers of twice the unified buffer
console = Console(stderr=True, highlight=False)


@triton.jit
def too_wide_kernel(x, y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's own types
    place = tl.arange(0, BLOCK)
    tl.store(y + place, tl.exp(tl.load(x + place)) + 1)


def rule(cu_seqlens: list[int] | None) -> None:
    """Forward and backward of the gated delta rule, as the plugin calls it."""
    from llamafactory_ascend.kernels.fla import gated_delta_rule

    query, key = zeros(1, TOKENS, KEY_HEADS, WIDTH), zeros(1, TOKENS, KEY_HEADS, WIDTH)
    value, beta = zeros(1, TOKENS, VALUE_HEADS, WIDTH), zeros(1, TOKENS, VALUE_HEADS)
    g = torch.zeros(1, TOKENS, VALUE_HEADS, requires_grad=True)
    lengths = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    output, _ = gated_delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=lengths)
    output.backward(torch.zeros_like(output))


def convolution() -> None:
    """Forward and backward of the convolution before it, as the plugin calls it."""
    from llamafactory_ascend.kernels.fla import causal_conv1d

    channels = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
    output = causal_conv1d(zeros(1, TOKENS, channels), zeros(channels, 4), None, "silu")
    output.backward(torch.zeros_like(output))


def too_wide() -> None:
    x = torch.zeros(TOO_WIDE)
    too_wide_kernel[(1,)](x, x, BLOCK=TOO_WIDE)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)


def show(result: Compiled) -> None:
    state = "[red]rejected[/]" if result.problem else f"{result.cores}, {result.hivm:,} bytes of HIVM IR"
    console.print(f"  {result.kernel:54} {result.seconds:5.1f} s  {state}", soft_wrap=True)
    if result.problem:
        console.print(f"{result.problem}", markup=False, soft_wrap=True)


def compile_part(title: str, part: Callable[[], None], launches: Launches) -> list[Compiled]:
    """Compile what a part launches, unless another has; return the results."""
    console.print(title, style="bold")
    before = len(launches.compiled)
    with console.status("compiling"):
        part()
    return launches.compiled[before:]


def main() -> int:
    pretended_npu.pretend()
    launches = Launches(show)
    launches.install()
    import fla

    pretended_npu.take_cpu_tensors()
    parts = {
        "gated delta rule": lambda: rule(None),
        "gated delta rule, packed samples": lambda: rule([0, 1000, 1001, TOKENS]),
        "causal convolution": convolution,
    }
    plain, packed, conv = [compile_part(title, part, launches) for title, part in parts.items()]
    (wide,) = compile_part("a kernel of twice the unified buffer", too_wide, launches)
    rejected = "overflow" in wide.problem.lower()

    def good(results: list[Compiled]) -> int:
        return sum(not result.problem for result in results)

    print(
        json.dumps(
            {
                "flash_linear_attention": fla.__version__,
                "triton_ascend": importlib.metadata.version("triton-ascend"),
                "target": pretended_npu.TARGET.arch,
                "compiled": good(plain),
                "kernels": len(plain),
                "packed_compiled": good(packed),
                "packed_kernels": len(packed),
                "convolution_compiled": good(conv),
                "convolution_kernels": len(conv),
                "too_wide_rejected": rejected,
            }
        )
    )
    kernels = plain + packed + conv
    return 0 if rejected and plain and packed and conv and good(kernels) == len(kernels) else 1


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="fla")
    sys.exit(main())
