"""The wheel: what is in it, and that it works where torch, wrapt and the host do not exist."""

import json
import zipfile
from pathlib import Path

import pytest

from llamafactory_ascend import resources
from tests.installed import ROOT, build_wheel, make_venv, run


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The python of an environment that holds our wheel and nothing else."""
    made = make_venv(tmp_path_factory.mktemp("empty") / "venv")
    run([str(made), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)])
    return str(made)


def test_wheel_holds_the_package_the_recipes_the_data_and_the_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == "llamafactory_ascend_plugin-0.1.0-py3-none-any.whl"
    for folder in ("recipes", "dataset_info"):
        shipped = {path.name for path in (ROOT / folder).iterdir()}
        assert {
            Path(name).name for name in names if name.startswith(f"llamafactory_ascend/{folder}/")
        } == shipped
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"llamafactory_ascend", "llamafactory_ascend_plugin-0.1.0.dist-info"}


def test_wheel_registers_the_entry_point_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    text = archive.read(name).decode()
    assert "[torch.backends]\nllamafactory_ascend = llamafactory_ascend._autoload:autoload" in text
    assert "llamafactory-ascend = llamafactory_ascend.cli:app" in text


def test_installed_wheel_reads_its_recipes_and_data(python: str, tmp_path: Path) -> None:
    code = (
        "import json; from llamafactory_ascend import resources as r; info = r.folder('dataset_info');"
        "rows = {k: len(json.loads((info / v['file_name']).read_text(encoding='utf-8')))"
        " for k, v in json.loads((info / 'dataset_info.json').read_text(encoding='utf-8')).items()"
        " if k != 'soulchat_r1'};"
        "texts = {k: v.read_text(encoding='utf-8') for k, v in r.recipes().items()};"
        "print(json.dumps([texts, rows, str(info)]))"
    )
    recipes, rows, where = json.loads(run([python, "-c", code], tmp_path))
    assert recipes == {
        path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "recipes").glob("*.yaml")
    }
    assert rows == {
        "vertical_demo": 90,
        "vertical_demo_eval": 12,
        "vertical_cpt_demo": 90,
        "product_attributes": 320,
        "product_attributes_eval": 80,
        "ascend_qa": 98,
        "ascend_qa_eval": 12,
        "long_demo": 1,
    }
    assert "site-packages" in where


def test_checkout_reads_the_same_files() -> None:
    assert Path(str(resources.folder("dataset_info"))) == ROOT / "dataset_info"
    assert sorted(resources.recipes()) == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


def test_missing_folder_says_that_the_installation_is_incomplete() -> None:
    with pytest.raises(FileNotFoundError, match="incomplete, reinstall"):
        resources.folder("no_such_folder")


def test_entry_point_runs_without_torch_wrapt_and_the_host(python: str, tmp_path: Path) -> None:
    code = (
        "import sys, llamafactory_ascend; from llamafactory_ascend import _autoload; _autoload.autoload();"
        "_autoload.autoload(); "
        "print(sum(isinstance(f, _autoload.Watcher) for f in sys.meta_path), 'torch' in sys.modules)"
    )
    assert run([python, "-c", code], tmp_path) == "1 False\n"
    missing = (
        "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'wrapt', 'llamafactory')])"
    )
    assert run([python, "-c", missing], tmp_path) == "[None, None, None]\n"
