"""Compile the simulated NPU once for each (sources, flags, torch, Python); load it from a cache.

``$SIM_NPU_CACHE`` (default ``~/.cache/sim_npu``) holds one ``simnpu_C-<hash>.so`` per combination and
the lock file that lets one process build while the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

NAME = "simnpu_C"
SOURCES = Path(__file__).parent / "csrc"
TORCH = Path(torch.__file__).parent
# -O1: three quarters of the compile time of -O2, and the kernels proper are torch's own
COMPILE_FLAGS = [
    "-O1",
    "-fPIC",
    "-std=c++17",
    "-w",
    f"-DTORCH_EXTENSION_NAME={NAME}",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
]
LINK_FLAGS = ["-shared", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]


def compiler() -> list[str]:
    """The C++ compiler: ``$CXX`` (which may carry arguments), or g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def cache_root() -> Path:
    return Path(os.environ.get("SIM_NPU_CACHE") or Path.home() / ".cache" / "sim_npu")


def library_path(sources: Path = SOURCES) -> Path:
    """Where the library built from ``sources`` belongs, whether it exists or not."""
    digest = hashlib.sha256(repr((torch.__version__, sys.version, COMPILE_FLAGS, LINK_FLAGS)).encode())
    for source in sorted(sources.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return cache_root() / f"{NAME}-{digest.hexdigest()[:16]}.so"


def run_compiler(*arguments: str) -> None:
    command = [*compiler(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"simulated NPU: the C++ compiler failed (exit code {done.returncode})\n"
            f"  {shlex.join(command)}\n{done.stderr}"
        )


def build(sources: Path, library: Path) -> None:
    """Compile the files of ``sources`` in parallel and put ``library`` in place in one step.

    Raises:
        RuntimeError: with the compiler's own message. Nothing is left behind.
    """
    start = time.monotonic()
    python_include = sysconfig.get_paths()["include"]
    includes = [TORCH / "include", TORCH / "include/torch/csrc/api/include", python_include]
    with tempfile.TemporaryDirectory(prefix=f"{library.stem}.", dir=library.parent) as work:
        objects = {source: Path(work, f"{source.stem}.o") for source in sorted(sources.glob("*.cpp"))}

        def compile_one(source: Path) -> None:
            flags = [*COMPILE_FLAGS, *(f"-isystem{path}" for path in includes)]
            run_compiler(*flags, "-c", str(source), "-o", str(objects[source]))

        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            # the longest first, so that it does not run alone at the end
            list(pool.map(compile_one, sorted(objects, key=lambda s: s.stem not in ("autocast", "hccl"))))
        linked = Path(work, library.name)
        run_compiler(*map(str, objects.values()), "-o", str(linked), f"-L{TORCH / 'lib'}", *LINK_FLAGS)
        linked.replace(library)
    print(f"[sim_npu] built {library} in {time.monotonic() - start:.0f} s", file=sys.stderr)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / "lock").open("w")
    except OSError as error:
        raise RuntimeError(
            f"simulated NPU: cannot write to the build cache {root} ({error.strerror}); "
            "set SIM_NPU_CACHE to a writable directory"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        yield


def ensure_built(sources: Path = SOURCES) -> Path:
    """The library of ``sources``, built now if the cache has none.

    Several ranks or test workers may call this at once: the first builds, the others wait.
    """
    library = library_path(sources)
    if not library.exists():
        with locked(library.parent):
            if not library.exists():
                build(sources, library)
    return library


def load() -> ModuleType:
    """Import the extension module: device, operators and process group register themselves."""
    library = str(ensure_built())
    loader = importlib.machinery.ExtensionFileLoader(NAME, library)
    spec = importlib.util.spec_from_file_location(NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
