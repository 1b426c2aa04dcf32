"""The substitution in several versions of Transformers, each in a process of its own.

Up to 5.14 the layers bind the rule when they are built; from 5.15 on they look it up at every call, and
setting the old attribute does nothing, silently.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CACHE
from tests.kernels.versions import install

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["installed", "5.8.0", "5.14.1", "newest"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    path = [str(ROOT)]
    if request.param != "installed":
        path.insert(0, str(install(request.param, CACHE / "transformers")))
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.version_worker"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "LLAMAFACTORY_ASCEND": "0"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    if request.param[0].isdigit():
        assert result["version"] == request.param
    return result


def test_every_layer_is_called(found: dict[str, Any]) -> None:
    """Three of three, before and after the build, and the same logits as stock's."""
    for name, by_time in found["substituted"].items():
        for when, outcome in by_time.items():
            assert outcome["calls"] == [3, 3], (name, when, outcome)
            assert 0 < outcome["distance"] < 2e-6, (name, when, outcome)
            assert outcome["passed"] == [True, True] and outcome["reverted"], (name, when, outcome)


def test_packed_samples(found: dict[str, Any]) -> None:
    """Stock carries the first sample into the second; with us both are as if alone."""
    for name, distances in found["packed"].items():
        assert distances["stock"] > 5e-3, (name, distances)
        assert distances["ours"] < 2e-6 and distances["two_rows"] < 2e-6, (name, distances)
