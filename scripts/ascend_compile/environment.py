"""Makes the environment of the compiler: ``python -m scripts.ascend_compile.environment DIR``.

triton-ascend and triton own the same import package, so it needs an environment of its own. Everything else
is shared with the environment that runs this, by links: torch alone would be several gigabytes more.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

# Without their requirements: those are in the shared part, or needed only where kernels are run.
OWN = (
    "triton-ascend==3.2.0",
    "ascendnpu-ir==1.2.0",
    "pybind11",
    "flash-linear-attention==0.5.2",
    "fla-core==0.5.2",
)
NOT_SHARED = (
    "triton",
    "llamafactory",
    "pip-",
    "pip/",
    "setuptools",
    "pkg_resources",
    "fla/",
    "flash_linear",
    "fla_",
)


def make(folder: Path) -> Path:
    """Make the environment unless it is complete.

    Returns:
        Its python.
    """
    python = folder / "bin" / "python"
    done, content = folder / "complete", "\n".join(OWN) + "\n"
    if done.exists() and done.read_text(encoding="utf-8") == content:
        return python
    venv.create(folder, with_pip=True, clear=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        shared = not f"{entry.name}/".startswith(NOT_SHARED) and entry.suffix != ".pth"
        if shared and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *OWN], check=True)
    done.write_text(content, encoding="utf-8")
    return python


if __name__ == "__main__":
    print(make(Path(sys.argv[1]).absolute()))
