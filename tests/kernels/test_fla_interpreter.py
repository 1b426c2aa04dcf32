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
    "case, limit, limit_of_g",
    [
        # Decays are differences of cumulative sums: after strong ones, little is left of the gradient of g.
        ("model_float32", 5e-6, 1e-4),
        ("slow_packed_float32", 5e-6, 5e-6),
        ("model_bfloat16", 6e-3, 6e-3),
    ],
)
def test_rule(found: dict[str, Any], case: str, limit: float, limit_of_g: float) -> None:
    """Output and all five gradients, key heads shared, samples apart; what is a tenth too large is seen."""
    distances = dict(found["rule"][case])
    assert distances.pop("control") == pytest.approx(0.1, rel=0.01)
    assert set(distances) == {"output", "query", "key", "value", "g", "beta"}
    assert distances.pop("g") < limit_of_g
    assert all(distance < limit for distance in distances.values()), distances


@pytest.mark.parametrize("dtype, limit", [("float32", 5e-6), ("bfloat16", 3e-3)])
def test_convolution(found: dict[str, Any], dtype: str, limit: float) -> None:
    """Two packed samples; the second does not see the first."""
    distances = found["convolution"][dtype]
    assert len(distances) == 3
    assert all(distance < limit for distance in distances.values()), distances
