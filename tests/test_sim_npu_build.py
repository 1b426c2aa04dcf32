"""The simulated NPU's build: once for all processes, whole or not at all, and only where it belongs."""

import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from torch_npu import _build

from tests.sim_npu import available

SIM_NPU = Path(available.__file__).parent


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SIM_NPU_CACHE", str(folder))
    return folder


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two small files, quick to compile, of one library."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cpp").write_text("int two();\nint one() { return two() - 1; }\n")
    (folder / "two.cpp").write_text("int two() { return 2; }\n")
    return folder


@pytest.fixture
def compiler_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes CXX a slow g++ that notes each call in this file."""
    log, script = tmp_path / "calls", tmp_path / "slow g++"
    script.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\nsleep 0.3\nexec g++ "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f'"{script}" -O0')
    return log


def test_concurrent_builds_compile_once(cache: Path, sources: Path, compiler_log: Path) -> None:
    # the interpreters find the simulated NPU itself in the cache: only `sources` is to be built
    library = Path(sys.modules["torch_npu"]._sim.__file__)
    cache.mkdir()
    (cache / library.name).symlink_to(library)
    code = "import pathlib, sys, torch_npu as t; print(t._build.ensure_built(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(sources)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {rank.communicate(timeout=120)[0].strip() for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert paths == {str(_build.library_path(sources))}
    calls = compiler_log.read_text().splitlines()
    assert sorted(call.count(" -c ") for call in calls) == [0, 1, 1]  # two files, one link


def test_files_compile_in_parallel(cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = sources.parent / "meeting"
    # each compilation waits for the other: one after the other, neither would end
    script.write_text(
        """#!/bin/sh
case "$*" in *" -c "*)
    touch "$0.$$"
    for _ in $(seq 100); do
        [ "$(ls "$0".* | wc -l)" -ge 2 ] && exec g++ "$@"
        sleep 0.1
    done
    exit 9
esac
exec g++ "$@"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert _build.ensure_built(sources).exists()


def test_second_build_is_read_from_the_cache(cache: Path, sources: Path, compiler_log: Path) -> None:
    library = _build.ensure_built(sources)
    assert library.parent == cache and sorted(p.name for p in cache.iterdir()) == ["lock", library.name]
    compiler_log.unlink()
    assert _build.ensure_built(sources) == library
    assert not compiler_log.exists()


def test_changed_source_is_another_library(cache: Path, sources: Path) -> None:
    before = _build.library_path(sources)
    (sources / "two.cpp").write_text("int two() { return 3; }\n")
    changed = _build.library_path(sources)
    (sources / "two.cpp").rename(sources / "three.cpp")
    assert len({before, changed, _build.library_path(sources)}) == 3


def test_failed_compilation_shows_the_compilers_message_and_leaves_nothing(
    cache: Path, sources: Path
) -> None:
    (sources / "two.cpp").write_text("int two() { return no_such_name; }\n")
    with pytest.raises(RuntimeError, match=r"two\.cpp:1:.*no_such_name") as caught:
        _build.ensure_built(sources)
    assert "the C++ compiler failed (exit code 1)" in str(caught.value)
    assert [p.name for p in cache.iterdir()] == ["lock"]
    (sources / "two.cpp").write_text("int two() { return 2; }\n")
    assert _build.ensure_built(sources).exists()


def test_failed_link_leaves_nothing(cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "LINK_FLAGS", [*_build.LINK_FLAGS, "-lno_such_library"])
    with pytest.raises(RuntimeError, match="no_such_library"):
        _build.ensure_built(sources)
    assert [p.name for p in cache.iterdir()] == ["lock"]


def test_cache_that_cannot_be_written_names_the_variable(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SIM_NPU_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RuntimeError, match=r"cannot write to the build cache .*file.cache .*SIM_NPU_CACHE"):
        _build.ensure_built(sources)


def test_cache_in_the_home_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SIM_NPU_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _build.cache_root() == tmp_path / ".cache" / "sim_npu"


# ---- the package as others see it
def test_metadata_names_the_entry_point() -> None:
    distribution = metadata.distribution("torch_npu")
    assert distribution.version == sys.modules["torch_npu"].__version__
    (entry_point,) = distribution.entry_points.select(group="torch.backends")
    assert entry_point.load() is sys.modules["torch_npu"]._autoload


def test_readme_documents_every_variable() -> None:
    sources = [p for p in (SIM_NPU / "torch_npu").rglob("*") if p.suffix in (".py", ".cpp", ".h")]
    text = " ".join(p.read_text() for p in sources).replace('"', " ").replace("=", " ").replace("$", " ")
    used = {word.strip("`().,:;/") for word in text.split() if word.strip("`(").startswith("SIM_NPU_")}
    documented = {
        line.split("`")[1]
        for line in (SIM_NPU / "README.md").read_text().splitlines()
        if line.startswith("| `SIM_NPU_")
    }
    assert used == documented


# ---- where the simulated NPU may be used
def test_available_here() -> None:
    assert available.unavailable_reason() is None


def test_unavailable_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert available.unavailable_reason() == (
        "no C++ compiler: no-such-compiler is not on PATH (install g++, or set CXX)"
    )


def test_unavailable_beside_a_real_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "torch_npu-2.7.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.7.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert available.unavailable_reason() == (
        f"torch_npu 2.7.1 in {tmp_path} is real: the simulated one would hide it"
    )
    script = subprocess.run(
        [sys.executable, str(SIM_NPU / "available.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
    )
    assert script.returncode == 1
    assert script.stderr.startswith("simulated NPU unavailable: torch_npu 2.7.1")


def test_available_needs_neither_torch_nor_much_time() -> None:
    start = time.monotonic()
    code = "import sys, available; print(available.unavailable_reason(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=SIM_NPU, capture_output=True, text=True)
    assert done.stdout.split() == ["None", "False"], done.stderr
    assert time.monotonic() - start < 5
