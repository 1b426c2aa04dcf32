"""Environment variables that change a training on NPUs, and who set each."""

from collections.abc import Mapping
from dataclasses import dataclass

PREFIXES = ("HCCL_", "ASCEND_", "PYTORCH_NPU_", "LLAMAFACTORY_ASCEND", "TORCH_DEVICE_BACKEND_AUTOLOAD")
NAMES = (
    "TASK_QUEUE_ENABLE", "CPU_AFFINITY_CONF", "RANK_TABLE_FILE", "FORCE_TORCHRUN", "NPROC_PER_NODE", "NNODES",
    "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "USE_V1", "USE_RAY", "DISABLE_VERSION_CHECK",
    "OMP_NUM_THREADS",
)  # fmt: skip
# set_env.sh of CANN exports these; whoever sets them by hand means the same.
OF_CANN = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "ASCEND_AICPU_PATH")
LONGEST = 300  # characters of a value in a table


@dataclass(frozen=True)
class Variable:
    """A variable as a training will see it, and who set it."""

    name: str
    value: str
    setter: str


def shown(value: str) -> str:
    """Return a value for a table: the beginning of a long one, nothing that cannot be printed."""
    text = "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in value[:LONGEST]
    )
    return text if len(value) <= LONGEST else f"{text}... ({len(value):,} characters)"


def collect(environment: Mapping[str, str], defaults: Mapping[str, str]) -> list[Variable]:
    """Return the variables that matter, by name.

    Args:
        environment: of the user's shell.
        defaults: what the plugin sets when a training starts, where the shell does not.
    """
    named = {
        name: value
        for name, value in environment.items()
        if name in NAMES or name in defaults or name.startswith(PREFIXES)
    }
    found = [
        Variable(name, value, "CANN's set_env.sh" if name in OF_CANN else "this shell")
        for name, value in named.items()
    ]
    found += [
        Variable(name, value, "the plugin, when a training starts")
        for name, value in defaults.items()
        if name not in named
    ]
    return sorted(found, key=lambda variable: variable.name)
