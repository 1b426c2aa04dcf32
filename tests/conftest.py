"""One simulator, one set of tiny models, one way to run the stock command."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CACHE = TESTS.parent / ".test_cache"

from tests.running import STARTUP, Train  # noqa: E402
from tests.sim_npu.available import unavailable_reason  # noqa: E402

SIMULATOR_MISSING = unavailable_reason()
collect_ignore_glob = ["test_sim_npu_*"] if SIMULATOR_MISSING else []
paths = [str(STARTUP), os.environ.get("PYTHONPATH", "")]
if not SIMULATOR_MISSING:
    # Before torch is imported anywhere: it loads the simulated NPU from this path, here and in every child.
    sys.path.insert(0, str(TESTS / "sim_npu"))
    paths.insert(0, str(TESTS / "sim_npu"))
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
os.environ.setdefault("SIM_NPU_CACHE", str(CACHE / "sim_npu"))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
for name in ("LLAMAFACTORY_ASCEND", "LLAMAFACTORY_ASCEND_PLUGINS", "LLAMAFACTORY_ASCEND_TRACE"):
    os.environ.pop(name, None)

import pytest  # noqa: E402

from tests import assets as assets_package  # noqa: E402


def pytest_report_header() -> str:
    return f"simulated NPU: {'off, ' + SIMULATOR_MISSING if SIMULATOR_MISSING else 'on'}"


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of tiny models and data, built once for all workers."""
    folder = CACHE / "assets"
    assets_package.build(folder)
    return folder


@pytest.fixture
def train(assets: Path, tmp_path: Path) -> Train:
    """``train(**recipe)`` runs stock ``llamafactory-cli train`` and returns what came of it."""
    return Train(assets, tmp_path, SIMULATOR_MISSING)


@pytest.fixture(scope="module")
def train_once(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The same for runs that several tests of a module look at."""
    return Train(assets, tmp_path_factory.mktemp("runs"), SIMULATOR_MISSING)
