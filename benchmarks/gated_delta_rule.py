"""Compare our gated delta rule with Transformers': operator launches, time, peak memory and rounding error.

    python benchmarks/gated_delta_rule.py

Takes the installed Transformers, and the newest release installed with pip into a temporary folder. No NPU is
needed: launches are counted on the meta device, time is a CPU's on one thread, memory is counted by the
simulated NPU of tests/sim_npu, errors are against the token-by-token float64 reference of the tests. The last
line is one JSON object: launch and time ratios are theirs / ours, peak ratios ours / theirs, `_newest` those
to the newest Transformers; `err_fp32` and `err_bf16` leave out near-identical keys, which have their own.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
TOKENS, HEADS, WIDTH, TIMED_HEADS, REPEATS = 4096, 48, 128, 8, 3
# Allocations and reinterpretations that the dispatcher sees but no device runs.
NOT_LAUNCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}

Rule = Callable[..., tuple[Tensor, Tensor | None]]


class LaunchCounter(TorchDispatchMode):
    """Counts the operators that a device would run; views and allocations are not among them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        self.count += not func.is_view and name not in NOT_LAUNCHED
        return func(*args, **(kwargs or {}))


def make_inputs(device: str, heads: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return query, key, value, g and beta as the model makes them, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(1, TOKENS, heads, *shape, generator=generator)

    query, key, value, d_output = (randn(WIDTH).to(device, dtype) for _ in range(4))
    g, beta = -randn().abs(), randn().sigmoid().to(dtype)
    return [x.to(device).requires_grad_() for x in (query, key, value, g, beta)], d_output


def run(rule: Rule, inputs: list[Tensor], d_output: Tensor) -> None:
    """Do one forward and backward pass."""
    output, _ = rule(*inputs, use_qk_l2norm_in_kernel=True)
    output.backward(d_output)
    for x in inputs:
        x.grad = None


def count_launches(rule: Rule) -> int:
    """Return the operators that forward and backward launch."""
    inputs, d_output = make_inputs("meta", HEADS, torch.bfloat16)
    run(rule, inputs, d_output)  # whatever is built once per process is built here
    with LaunchCounter() as counter:
        run(rule, inputs, d_output)
    return counter.count


def measure_peak(rule: Rule) -> int:
    """Return the most bytes that forward and backward hold on the simulated NPU, inputs not counted."""
    inputs, d_output = make_inputs("npu", HEADS, torch.bfloat16)
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    run(rule, inputs, d_output)
    return torch.npu.max_memory_allocated() - before


def measure_times(rules: list[Rule]) -> list[float]:
    """Return the median seconds of forward and backward of each rule on the CPU, measured in turns."""
    inputs, d_output = make_inputs("cpu", TIMED_HEADS, torch.float32)
    seconds: list[list[float]] = [[] for _ in rules]
    for repeat in range(REPEATS + 1):
        for rule, own in zip(rules, seconds, strict=True):
            start = time.perf_counter()
            run(rule, inputs, d_output)
            if repeat:  # the first warms up
                own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in seconds]


def measure_errors(kind: str, dtype: torch.dtype) -> dict[str, float]:
    """Return our error against the float64 reference: of the output and of the five gradients."""
    from llamafactory_ascend.kernels.gated_delta_rule import chunk_gated_delta_rule
    from tests.kernels.reference import error, make_case, recurrent_gated_delta_rule

    case = make_case(kind, batch=1, tokens=300, key_heads=2, value_heads=2, key_dim=WIDTH, value_dim=WIDTH)
    inputs = [x if name == "g" else x.to(dtype) for name, x in zip(case._fields, case, strict=True)]
    d_output = inputs.pop()
    ours = [x.clone().requires_grad_() for x in inputs]
    output, _ = chunk_gated_delta_rule(*ours, use_qk_l2norm_in_kernel=True)
    output.backward(d_output)
    exact = [x.double().requires_grad_() for x in inputs]
    expected, _ = recurrent_gated_delta_rule(*exact)
    expected.backward(d_output.double())
    pairs = [(output, expected), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    names = ("output", *(f"d_{name}" for name in case._fields))
    return {name: error(a, b) for name, (a, b) in zip(names, pairs, strict=False)}


def work(which: str) -> dict[str, Any]:
    """Measure one rule in this process: `ours`, or `transformers` as this process imports it."""
    from llamafactory_ascend.kernels.gated_delta_rule import chunk_gated_delta_rule

    torch.set_num_threads(1)
    if which == "ours":
        return {
            "launches": count_launches(chunk_gated_delta_rule),
            "peak": measure_peak(chunk_gated_delta_rule),
        }
    import transformers
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    theirs, ours = measure_times([torch_chunk_gated_delta_rule, chunk_gated_delta_rule])
    return {
        "version": transformers.__version__,
        "launches": count_launches(torch_chunk_gated_delta_rule),
        "peak": measure_peak(torch_chunk_gated_delta_rule),
        "seconds": theirs,
        "our_seconds": ours,
    }


def start_worker(which: str, packages: list[Path]) -> dict[str, Any]:
    """Run `work` in a process of its own that finds `packages` and the simulated NPU first."""
    path = os.pathsep.join(str(folder) for folder in (*packages, ROOT / "tests" / "sim_npu", ROOT))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "LLAMAFACTORY_ASCEND": "0"}
    command = [sys.executable, __file__, "--worker", which]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def install_newest(folder: Path) -> None:
    """Install the newest Transformers into `folder`, and of its requirements those the environment lacks."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    environment = {**os.environ, "PYTHONPATH": ""}
    subprocess.run([*command, "transformers"], env=environment, check=True)
    (newest,) = importlib.metadata.distributions(path=[str(folder)], name="transformers")
    missing = []
    for requirement in map(Requirement, newest.requires or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            try:
                satisfied = importlib.metadata.version(requirement.name) in requirement.specifier
            except importlib.metadata.PackageNotFoundError:
                satisfied = False
            if not satisfied:
                missing.append(f"{requirement.name}{requirement.specifier}")
    if missing:
        subprocess.run([*command, *missing], env=environment, check=True)


def main() -> None:
    """Measure everything and print it; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--worker", choices=("ours", "transformers"), help="measure one rule only (used inside)"
    )
    worker = parser.parse_args().worker
    if worker:
        print(json.dumps(work(worker)))
        return

    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    ours, installed = start_worker("ours", []), start_worker("transformers", [])
    with tempfile.TemporaryDirectory() as folder:
        install_newest(Path(folder))
        newest = start_worker("transformers", [Path(folder)])
    print(
        f"T {TOKENS}; launches, peak: {HEADS} heads of {WIDTH}, bfloat16; time: {TIMED_HEADS} heads, float32"
    )
    print(f"ours: {ours['launches']} launches, peak {ours['peak'] / 1e6:.0f} MB (simulated NPU)")
    for theirs in (installed, newest):
        print(
            f"transformers {theirs['version']}: {theirs['launches']} launches,"
            f" peak {theirs['peak'] / 1e6:.0f} MB,"
            f" {theirs['seconds']:.2f} s where ours takes {theirs['our_seconds']:.2f} s (CPU, one thread)"
        )
    errors = {}
    for kind in ("model", "slow", "strong", "same_key"):
        for dtype in (torch.float32, torch.bfloat16):
            errors[kind, dtype] = measure_errors(kind, dtype)
            figures = " ".join(f"{name} {value:.1e}" for name, value in errors[kind, dtype].items())
            print(f"error {kind:8} {str(dtype).removeprefix('torch.'):8} {figures}")

    def worst(dtype: torch.dtype, *kinds: str) -> float:
        return max(value for kind in kinds for value in errors[kind, dtype].values())

    print(
        json.dumps(
            {
                "launch_ratio": round(installed["launches"] / ours["launches"], 2),
                "launch_ratio_newest": round(newest["launches"] / ours["launches"], 2),
                "time_ratio": round(installed["seconds"] / installed["our_seconds"], 2),
                "time_ratio_newest": round(newest["seconds"] / newest["our_seconds"], 2),
                "peak_ratio": round(ours["peak"] / installed["peak"], 3),
                "peak_ratio_newest": round(ours["peak"] / newest["peak"], 3),
                "err_fp32": worst(torch.float32, "model", "slow", "strong"),
                "err_bf16": worst(torch.bfloat16, "model", "slow", "strong"),
                "err_same_key_bf16": worst(torch.bfloat16, "same_key"),
            }
        )
    )


if __name__ == "__main__":
    main()
