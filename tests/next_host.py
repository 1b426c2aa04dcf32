"""Makes the environment of the next host: ``python -m tests.next_host DIR``.

llamafactory-kt 0.9.6.dev0 is a fork of the host's main branch and owns the same import package, so it needs
an environment of its own. Everything but the host and Transformers is shared with the environment that runs
this, by links: torch alone would be several gigabytes more.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

REPLACED = ("llamafactory-kt==0.9.6.dev0", "transformers==5.8.0")
OWN = (
    "llamafactory-",
    "llamafactory/",
    "transformers-",
    "transformers/",
    "pip-",
    "pip/",
    "setuptools",
    "pkg_resources",
)
SCRIPTS = {
    "torchrun": "from torch.distributed.run import main",
    "accelerate": "from accelerate.commands.accelerate_cli import main",
    "llamafactory-ascend": "from llamafactory_ascend.cli import app as main",
}


def make(folder: Path) -> Path:
    """Make the environment unless it is complete.

    Returns:
        Its python.
    """
    python = folder / "bin" / "python"
    done = folder / "complete"
    if done.exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not f"{entry.name}/".startswith(OWN) and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *REPLACED], check=True)
    for name, line in SCRIPTS.items():  # those of the other environment would start the other Python
        script = folder / "bin" / name
        script.write_text(f"#!{python}\n{line}\n\nmain()\n", encoding="utf-8")
        script.chmod(0o755)
    done.write_text("\n".join(REPLACED) + "\n", encoding="utf-8")
    return python


if __name__ == "__main__":
    print(make(Path(sys.argv[1]).absolute()))
