"""The gated delta rule on a CUDA GPU: flash-linear-attention's and the plugin's against Transformers'.

What it shows carries over to an NPU in part only: on CUDA flash-linear-attention runs its generic kernels,
not its Ascend ones, and times are the GPU's. Errors are relative L2 against the token-by-token float64
recurrence on the same rounded inputs, the largest of the output and five gradients. A table goes to stderr;
the last line of stdout is JSON. Exit codes: 0 good, 1 an error beyond its limit, 2 nothing could be checked.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["LLAMAFACTORY_ASCEND"] = "0"  # Transformers as it is
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the packages below

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tests.kernels.reference import Case, error, make_case, recurrent_gated_delta_rule

EPILOG = """examples:
  python scripts/gpu_check.py                         on the current GPU, 4,096 tokens; needs 16 GB
  CUDA_VISIBLE_DEVICES=1 python scripts/gpu_check.py  on another GPU
  python scripts/gpu_check.py --device cpu --small    tries the script itself: no flash-linear-attention

flash-linear-attention is compared where it is installed:
  pip install --no-deps flash-linear-attention==0.5.2 fla-core==0.5.2 && pip install einops
"""
WIDTH = 128
# float32: Triton multiplies it as TF32 on a GPU, the plugin does not. bfloat16: a few roundings.
LIMITS = {"pytorch": {"float32": 1e-5, "bfloat16": 6e-3}, "fla": {"float32": 1e-2, "bfloat16": 1e-2}}
Rule = Callable[..., tuple[Tensor, Tensor | None]]
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Size:
    """Tokens of the error cases; tokens, key heads, value heads and repetitions of the timed one."""

    checked_tokens: int
    timed_tokens: int
    key_heads: int
    value_heads: int
    repeats: int


FULL, SMALL = Size(512, 4096, 16, 32, 10), Size(130, 256, 1, 2, 2)


@dataclass(frozen=True)
class Measured:
    """One rule's figures: largest errors by dtype, median milliseconds of forward and backward, peak bytes.

    The peak is above the inputs, None on a CPU, where torch does not count.
    """

    errors: dict[str, float]
    milliseconds: float
    peak: int | None


def find_rules(device: str) -> tuple[dict[str, Rule], str]:
    """Return the rules by name, and why flash-linear-attention is not among them, "" if it is."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    from llamafactory_ascend.kernels.gated_delta_rule import chunk_gated_delta_rule

    def of_transformers(
        query: Tensor, key: Tensor, value: Tensor, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        group = value.shape[2] // key.shape[2]  # its layer repeats the key heads before the call
        repeated = [x.repeat_interleave(group, 2) for x in (query, key)]
        result: tuple[Tensor, Tensor | None] = torch_chunk_gated_delta_rule(*repeated, value, **how)
        return result

    rules: dict[str, Rule] = {"transformers": of_transformers, "pytorch": chunk_gated_delta_rule}
    if device == "cpu":
        return rules, "Triton has no compiler for a CPU"
    if importlib.util.find_spec("fla") is None:
        return rules, "it is not installed"
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as of_fla

    return {**rules, "fla": of_fla}, ""


def inputs_of(case: Case, dtype: torch.dtype, device: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs by name as leaves, g in float32 as in the models, and the gradient of the output."""
    named = case._asdict()
    d_output = named.pop("d_output").to(device, dtype)
    leaves = {
        name: x.to(device, torch.float32 if name == "g" else dtype).requires_grad_()
        for name, x in named.items()
    }
    return leaves, d_output


def forward_backward(rule: Rule, inputs: dict[str, Tensor], d_output: Tensor, **how: Any) -> list[Tensor]:
    """Return output and input gradients."""
    output, _ = rule(**inputs, **how)
    return [output.detach(), *torch.autograd.grad(output, list(inputs.values()), d_output.to(output.dtype))]


def measure_errors(rules: dict[str, Rule], size: Size, device: str) -> dict[str, dict[str, float]]:
    """Return rule -> dtype -> the largest error; two value heads share a key head."""
    case = make_case("model", 1, size.checked_tokens, 2, 4, WIDTH, WIDTH)
    found: dict[str, dict[str, float]] = {name: {} for name in rules}
    for dtype in (torch.float32, torch.bfloat16):
        inputs, d_output = inputs_of(case, dtype, device)
        exact = {key: x.detach().double().requires_grad_() for key, x in inputs.items()}
        expected = forward_backward(recurrent_gated_delta_rule, exact, d_output)
        for name, rule in rules.items():
            actual = forward_backward(rule, inputs, d_output, use_qk_l2norm_in_kernel=True)
            errors = [error(one, other) for one, other in zip(actual, expected, strict=True)]
            # Not max() alone: it would pass over a NaN.
            found[name][str(dtype)[6:]] = max(errors) if all(e == e for e in errors) else float("inf")
    return found


def measure_cost(rule: Rule, size: Size, device: str) -> tuple[float, int | None]:
    """Return median milliseconds and peak bytes of forward and backward in bfloat16, after two to warm up."""
    case = make_case("model", 1, size.timed_tokens, size.key_heads, size.value_heads, WIDTH, WIDTH)
    inputs, d_output = inputs_of(case, torch.bfloat16, device)
    on_gpu, times, before = device == "cuda", [], 0
    for repeat in range(size.repeats + 2):
        if repeat == 2 and on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        forward_backward(rule, inputs, d_output, use_qk_l2norm_in_kernel=True)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[2:]), torch.cuda.max_memory_allocated() - before if on_gpu else None


def within_limits(name: str, errors: dict[str, float]) -> bool:
    return all(errors[dtype] <= limit for dtype, limit in LIMITS.get(name, {}).items())


def show(measured: dict[str, Measured], size: Size) -> None:
    table = Table(title=f"{size.timed_tokens:,} tokens, {size.key_heads}/{size.value_heads} heads of {WIDTH}")
    for title in ("rule", "float32", "bfloat16", "ms", "speedup", "peak MB", ""):
        table.add_column(title, justify="left" if title in ("rule", "") else "right")
    base = measured["transformers"].milliseconds
    for name, one in measured.items():
        limits = "ok" if within_limits(name, one.errors) else "beyond its limit"
        table.add_row(
            name,
            f"{one.errors['float32']:.1e}",
            f"{one.errors['bfloat16']:.2%}",
            f"{one.milliseconds:,.1f}",
            f"{base / one.milliseconds:.2f}x",
            "-" if one.peak is None else f"{one.peak / 1e6:,.0f}",
            limits if name in LIMITS else "compared with",
        )
    console.print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--small", action="store_true", help="few tokens and heads; times mean nothing then")
    return parser.parse_args()


def main() -> int:
    given = parse()
    if given.device == "cuda" and not torch.cuda.is_available():
        console.print(
            "There is no CUDA GPU here (torch.cuda.is_available() is false): nothing was checked.\n"
            "Run it on a machine with one, or try it: python scripts/gpu_check.py --device cpu --small",
            soft_wrap=True,
        )
        return 2
    device_name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    size = SMALL if given.small else FULL
    rules, missing = find_rules(given.device)
    console.print(f"device: {device_name}, torch {torch.__version__}")
    if missing:
        console.print(f"flash-linear-attention is left out: {missing}")
    with console.status("errors"):
        errors = measure_errors(rules, size, given.device)
    measured = {}
    for name, rule in rules.items():
        with console.status(f"time of {name}"):
            measured[name] = Measured(errors[name], *measure_cost(rule, size, given.device))
    show(measured, size)
    good = all(within_limits(name, one.errors) for name, one in measured.items())
    base = measured["transformers"].milliseconds
    figures = {
        name: {
            "error_float32": one.errors["float32"],
            "error_bfloat16": one.errors["bfloat16"],
            "milliseconds": round(one.milliseconds, 3),
            "speedup": round(base / one.milliseconds, 3),
            "peak_bytes": one.peak,
        }
        for name, one in measured.items()
    }
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    print(
        json.dumps(
            {"device": device_name, "versions": versions, "good": good, "fla_left_out": missing, **figures}
        )
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
