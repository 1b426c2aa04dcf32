"""One simulator, one set of tiny models, one way to run the stock command."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CACHE = TESTS.parent / ".test_cache"

# Before torch is imported anywhere: it loads the simulated NPU from this path, here and in every child.
sys.path.insert(0, str(TESTS / "sim_npu"))
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS / "sim_npu"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
os.environ.setdefault("SIM_NPU_CACHE", str(CACHE / "sim_npu"))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
for name in ("LLAMAFACTORY_ASCEND", "LLAMAFACTORY_ASCEND_PLUGINS", "LLAMAFACTORY_ASCEND_TRACE"):
    os.environ.pop(name, None)

import pytest  # noqa: E402

from tests import assets as assets_package  # noqa: E402
from tests.running import Train  # noqa: E402


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of tiny models and data, built once for all workers."""
    folder = CACHE / "assets"
    assets_package.build(folder)
    return folder


@pytest.fixture
def train(assets: Path, tmp_path: Path) -> Train:
    """``train(**recipe)`` runs stock ``llamafactory-cli train`` and returns what came of it."""
    return Train(assets, tmp_path)


@pytest.fixture(scope="module")
def train_once(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The same for runs that several tests of a module look at."""
    return Train(assets, tmp_path_factory.mktemp("runs"))
