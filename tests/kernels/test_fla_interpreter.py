"""flash-linear-attention's Ascend kernels, unmodified, in Triton's interpreter on the CPU.

This shows what they calculate, not that they compile (see scripts/ascend_compile) or how fast they are.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.conftest import CACHE

ROOT = Path(__file__).parents[2]
VERSION = "0.5.2"
ASCEND = ".backends.triton_ascend."
DISTANCES = ("output", "query", "key", "value", "g", "beta")


def install(folder: Path) -> Path:
    """Install the package and its core, without torch and Triton, unless they are complete there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if not (folder / "complete").exists():
            # At once: both put files into `fla`, and pip leaves a folder of an earlier call alone.
            both = [f"{name}=={VERSION}" for name in ("flash-linear-attention", "fla-core")]
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                str(folder),
            ]
            subprocess.run([*command, *both], check=True)
            (folder / "complete").touch()
    return folder


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    path = [str(install(CACHE / "fla" / VERSION)), str(ROOT)]
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.fla_worker"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "LLAMAFACTORY_ASCEND": "0",
            "TRITON_INTERPRET": "1",
        },
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    assert result["version"] == VERSION
    return result


def test_it_is_the_ascend_kernels_that_run(found: dict[str, Any]) -> None:
    """All of forward and backward; not one of the generic kernels is left."""
    assert len(found["rule_kernels"]) == 19 and len(found["convolution_kernels"]) == 4
    for kernels in (found["rule_kernels"], found["convolution_kernels"]):
        assert all(ASCEND in module for module in kernels.values()), kernels


@pytest.mark.parametrize(
    "case, limit",
    [
        ("moderate_float32", 5e-6),
        ("moderate_bfloat16", 6e-3),
        ("slow_packed_float32", 5e-6),
        ("model_bfloat16", 6e-3),
    ],
)
def test_rule(found: dict[str, Any], case: str, limit: float) -> None:
    """Output and all five gradients, key heads shared or not, samples apart; a tenth too large is seen."""
    distances = {name: found["rule"][case][name] for name in DISTANCES}
    assert all(distance < limit for distance in distances.values()), distances
    assert found["rule"][case]["control"] == pytest.approx(0.1, rel=0.01)


def test_strong_decay_costs_the_gradient_of_g_digits_as_it_does_in_the_stock_rule(
    found: dict[str, Any],
) -> None:
    """Decays as Qwen3.5 initialises them, in float32: the gradient of g alone is beyond 5e-6, in stock too.

    The kernels take it from <q, dq> - <k, dk>. What a token writes and reads itself is most of either and no
    decay is in it: float32 rounds away what strong decay leaves of the difference. And a decay is itself a
    difference of cumulative sums, here of 2,000 and more, which costs 1e-5 alone.
    """
    ours, stock = found["rule"]["model_float32"], found["stock_rule"]
    assert all(ours[name] < 5e-6 and stock[name] < 5e-6 for name in DISTANCES if name != "g"), (ours, stock)
    assert 5e-6 < stock["g"] < 5e-5
    assert ours["g"] < 4 * stock["g"]
    assert ours["g_of_terms"] < 1e-6 and stock["g_of_terms"] < 1e-6


@pytest.mark.parametrize("dtype, limit", [("float32", 5e-6), ("bfloat16", 3e-3)])
def test_convolution(found: dict[str, Any], dtype: str, limit: float) -> None:
    """Two packed samples; the second does not see the first."""
    distances = found["convolution"][dtype]
    assert len(distances) == 3
    assert all(distance < limit for distance in distances.values()), distances
