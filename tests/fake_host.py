"""A host of a few lines and a torch of ten, for tests of what happens while they are imported.

The modules have the names and the signatures of LLaMA-Factory's, and every one of them imports torch in its
first line, so that the entry point is called from inside whichever is imported first.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What torch does at the end of its own import, and nothing else.
TORCH = """
import os
from importlib.metadata import entry_points
__version__ = "0"
if os.getenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
    for entry in entry_points(group="torch.backends"):
        if entry.name == "llamafactory_ascend":
            try:
                entry.load()()
            except Exception as error:
                raise RuntimeError("Failed to load the backend extension") from error
"""

HOST = {
    "llamafactory/__init__.py": "",
    "llamafactory/extras/__init__.py": "",
    "llamafactory/extras/env.py": "VERSION = '0.fake'\n",
    "llamafactory/launcher.py": "import torch\ndef launch():\n    return 'launched'\n",
    "llamafactory/cli.py": "def main():\n    from . import launcher\n    return launcher.launch()\n",
    "llamafactory/hparams/__init__.py": "from .parser import get_train_args, read_args\n",
    "llamafactory/hparams/parser.py": """
import torch
def read_args(args=None):
    return args
def _parse_args(parser, args=None, allow_extra_keys=False):
    return read_args(args)
def get_train_args(args=None):
    return _parse_args(None, args)
""",
    "llamafactory/model/__init__.py": "from .loader import load_model\n",
    "llamafactory/model/loader.py": """
import torch
def load_model(tokenizer, model_args, finetuning_args, is_trainable=False, add_valuehead=False):
    return 'model'
""",
    "llamafactory/model/model_utils/__init__.py": "",
    "llamafactory/model/model_utils/checkpointing.py": """
import torch
def _gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None, use_unsloth_gc=False):
    return 'enabled'
""",
    "llamafactory/train/__init__.py": "",
    "llamafactory/train/tuner.py": """
import torch
from ..hparams import get_train_args, read_args
from ..model import load_model
def _training_function(config):
    return get_train_args(config)
""",
    "llamafactory/v1/__init__.py": "",
    "llamafactory/v1/config/__init__.py": "from .arg_parser import get_args\n",
    "llamafactory/v1/config/arg_parser.py": "import torch\ndef get_args(args=None):\n    return args\n",
}

# The functions of the fake host that a patch replaces.
SEAMS = {
    "llamafactory.launcher": "launch",
    "llamafactory.hparams.parser": "get_train_args",
    "llamafactory.train.tuner": "_training_function",
    "llamafactory.v1.config.arg_parser": "get_args",
    "llamafactory.model.loader": "load_model",
    "llamafactory.model.model_utils.checkpointing": "_gradient_checkpointing_enable",
}

STATES = """
import json
from llamafactory_ascend.host import seams
print("STATES", json.dumps({name: [str(r.state), r.reason] for name, r in seams.ledger().records.items()}))
"""


@dataclass(frozen=True)
class Result:
    """A finished script: exit code, stdout, and the lines of ours on stderr."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("[llamafactory-ascend]")]

    @property
    def states(self) -> dict[str, tuple[str, str]]:
        text = next(line for line in self.out.splitlines() if line.startswith("STATES "))
        found: dict[str, Any] = json.loads(text.removeprefix("STATES "))
        return {name: (state, reason) for name, (state, reason) in found.items()}


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write a tree of text files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def write_plugin(folder: Path, name: str, code: str) -> Path:
    """Write a third-party plugin as pip would install it: a module and the metadata with its entry point."""
    return write(
        folder,
        {
            f"{name}_plugin.py": code,
            f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
            f"{name}-1.0.dist-info/entry_points.txt": f"[llamafactory_ascend]\n{name} = {name}_plugin\n",
        },
    )


def run(*path: Path, script: str, words: tuple[str, ...] = (), **env: str) -> Result:
    """Run a script in a Python whose path begins with the given folders; no simulated NPU."""
    process = subprocess.run(
        [sys.executable, "-c", script, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Result(process.returncode, process.stdout, process.stderr)
