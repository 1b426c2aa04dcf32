"""One kernel from Triton's IR through linalg to memory-planned HIVM IR, as triton-ascend does it on an NPU.

The last stage of bishengir-compile hands the HIVM IR to `hivmc`, which comes with CANN only. A stand-in
takes its place and keeps what it is given, so everything up to there is real: lowering, tiling, the split
into cube and vector cores, synchronisation, and the plan of the unified buffer, which rejects what does not
fit.
"""

import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ascendnpuir
from triton._C.libtriton import ir
from triton.backends import backends
from triton.compiler import ASTSource

from tests.kernels.pretended_npu import TARGET

BACKEND = backends["ascend"].compiler
STAGES = BACKEND.add_stages.__globals__  # the functions of the back end's module, which is loaded by path
LIMIT = 300  # seconds for a kernel; the slowest needs a few

STAND_IN = """#!/bin/sh
case "$*" in *version*) echo "hivmc 1.2.0"; exit 0;; esac
for argument in "$@"; do [ -f "$argument" ] && cp "$argument" "$HIVM_KEPT"; done
exit 0
"""

# Options of the back end that it passes on, where they are set.
PASSED_ON = {
    "unit_flag": "enable-hivm-unit-flag-sync",
    "limit_auto_multi_buffer_only_for_local_buffer": "limit-auto-multi-buffer-only-for-local-buffer",
    "limit_auto_multi_buffer_of_local_buffer": "limit-auto-multi-buffer-of-local-buffer",
    "set_workspace_multibuffer": "set-workspace-multibuffer",
    "tile_mix_vector_loop": "tile-mix-vector-loop",
    "tile_mix_cube_loop": "tile-mix-cube-loop",
    "enable_hivm_auto_cv_balance": "enable-hivm-auto-cv-balance",
}
TELLING = re.compile("error|overflow|fail|requires|assert|exceed", re.IGNORECASE)


@dataclass(frozen=True)
class Compiled:
    """What came of a kernel.

    Attributes:
        kernel: name of its function.
        cores: "aiv" (vector cores only), "aic" or "mix", "" where it did not get that far.
        hivm: bytes of its HIVM IR, 0 where there is none.
        problem: what the compiler says, "" if it compiled.
        seconds: time taken.
    """

    kernel: str
    cores: str = ""
    hivm: int = 0
    problem: str = ""
    seconds: float = 0.0


def compile_kernel(
    function: Any, signature: dict[str, str], constants: dict[str, Any], **how: Any
) -> Compiled:
    """Compile one specialisation of a kernel; what the compiler rejects is a result, not an exception.

    Args:
        function: the `triton.jit` function.
        signature: argument -> type, e.g. "*bf16".
        constants: argument -> value.
        how: `options` of the launch and `attrs`, both as the back end makes them.
    """
    begin, name = time.monotonic(), function.__name__
    try:
        linalg, metadata = lower(function, signature, constants, **how)
        hivm, problem = plan(linalg, metadata)
        cores = metadata["mix_mode"]
    except subprocess.CalledProcessError as error:  # triton-adapter-opt, to linalg
        cores, hivm, problem = "", 0, telling(error.stderr.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        cores, hivm, problem = "", 0, f"no end after {LIMIT} s"
    except Exception as error:  # Triton's front end raises many kinds; each is a verdict on this kernel
        cores, hivm, problem = "", 0, telling(f"{type(error).__name__}: {error}")
    return Compiled(name, cores, hivm, problem, time.monotonic() - begin)


def lower(
    function: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    options: Any = None,
    attrs: Any = None,
) -> tuple[str, dict[str, Any]]:
    """Return linalg IR and the metadata of a kernel."""
    backend = BACKEND(TARGET)
    parsed = backend.parse_options(options or {})
    source = ASTSource(fn=function, signature=signature, constants=constants, attrs=attrs)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"hash": function.__name__, "target": TARGET, **parsed.__dict__}
    module = source.make_ir(parsed, backend.get_codegen_implementation(), backend.get_module_map(), context)
    module = STAGES["make_ttir"](module, metadata, parsed)
    linalg = STAGES["ttir_to_linalg"](module, metadata, parsed, named_ops=True)
    found: tuple[str, dict[str, Any]] = STAGES["_parse_linalg_metadata"](linalg, metadata)
    return found


def plan(linalg: str, metadata: dict[str, Any]) -> tuple[int, str]:
    """Compile linalg IR; return the bytes of its HIVM IR and "", or 0 and what the compiler says."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, kept, stand_in = folder / "kernel.ttadapter.mlir", folder / "kept.mlir", folder / "hivmc"
        source.write_text(linalg, encoding="utf-8")
        stand_in.write_text(STAND_IN, encoding="utf-8")
        stand_in.chmod(0o755)
        tools = Path(ascendnpuir.__file__).parent / "bin"
        command = [
            str(tools / "bishengir-compile"),
            str(source),
            f"--target={TARGET.arch}",
            f"--enable-auto-multi-buffer={metadata['multibuffer']}",
            f"--enable-auto-bind-sub-block={metadata['enable_auto_bind_sub_block']}",
            "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true",
            *(
                f"--{flag}={metadata[key]}"
                for key, flag in PASSED_ON.items()
                if metadata.get(key) is not None
            ),
            "-o",
            str(folder / "kernel"),
        ]
        path = os.pathsep.join((str(tools), str(folder), os.environ["PATH"]))
        environment = {**os.environ, "PATH": path, "HIVM_KEPT": str(kept)}
        process = subprocess.run(command, capture_output=True, timeout=LIMIT, env=environment)
        if process.returncode == 0 and kept.exists():
            return kept.stat().st_size, ""
        said = process.stderr.decode(errors="replace")
        return 0, telling(said) or f"bishengir-compile ended with {process.returncode} and made no HIVM IR"


def telling(text: str) -> str:
    """Return the first lines of a compiler's output that say something."""
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    return "\n".join([line for line in lines if TELLING.search(line)][:3] or lines[-3:])
