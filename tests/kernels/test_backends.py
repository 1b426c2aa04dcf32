"""Back ends as data: what they need, and that nothing heavy is imported to find out."""

import subprocess
import sys
from pathlib import Path

import pytest

from llamafactory_ascend.kernels import backends
from llamafactory_ascend.kernels.backends import BUILT_IN, Backend
from llamafactory_ascend.kernels.operators import OPERATORS


def make_distribution(folder: Path, name: str, version: str) -> None:
    """Write the metadata of an installed package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )


def test_every_operator_has_a_back_end() -> None:
    assert {one.operator for one in BUILT_IN} == set(OPERATORS)
    assert all(one.load() for one in BUILT_IN if one.name == "pytorch")
    assert all(one.varlen for one in BUILT_IN if OPERATORS[one.operator].sequential)


@pytest.mark.parametrize(
    "text, numbers", [("0.5.2", (0, 5, 2)), ("0.5.2rc1", (0, 5, 2)), ("0.10", (0, 10)), ("x", ())]
)
def test_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert backends.numbers(text) == numbers


def test_fla_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each missing piece is named, the cheapest first; fla is imported when nothing else is missing."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    assert "flash-linear-attention is not installed" in backends.fla_is_usable()
    make_distribution(tmp_path, "flash-linear-attention", "0.4.2")
    assert "0.4.2 has no complete Ascend kernels" in backends.fla_is_usable()
    next(tmp_path.glob("flash*")).rename(tmp_path / "gone")
    make_distribution(tmp_path, "flash-linear-attention", "0.5.2")
    assert "triton-ascend is not installed" in backends.fla_is_usable()
    make_distribution(tmp_path, "triton-ascend", "3.2.0")
    assert "CANN is not sourced" in backends.fla_is_usable()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "nowhere"))
    assert "does not exist" in backends.fla_is_usable()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert "fla" not in sys.modules
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").touch()
    (tmp_path / "fla" / "utils.py").write_text("IS_NPU = False\n", encoding="utf-8")
    try:
        assert "does not see the NPU" in backends.fla_is_usable()
        sys.modules["fla.utils"].IS_NPU = True  # type: ignore[attr-defined]
        assert backends.fla_is_usable() == ""
    finally:
        for name in ("fla", "fla.utils"):
            sys.modules.pop(name, None)


def test_nothing_heavy_is_imported() -> None:
    """The registry is read while `import peft` may still be under way: no torch, no Transformers."""
    code = (
        "import sys; import llamafactory_ascend.kernels.selection as s; "
        "from llamafactory_ascend.kernels import backends, families; "
        "[s.refusal(b, s.Conditions('cpu', 'CPU')) for b in backends.BUILT_IN]; "
        "print(sorted({'torch', 'transformers', 'fla', 'triton', 'torch_npu'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]", found.stdout


def test_load() -> None:
    assert Backend("x", "rms_norm", "math:sqrt").load()(9) == 3
