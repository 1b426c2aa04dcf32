"""Which host modules are watched, and what happens when one is ready. Light: loaded at ``import torch``."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamafactory_ascend.patching import Ledger

MODULES = (
    "llamafactory.launcher",
    "llamafactory.extras.arguments",
    "llamafactory.hparams.parser",
    "llamafactory.train.tuner",
    "llamafactory.v1.config.arg_parser",
    "llamafactory.model.loader",
    "llamafactory.model.model_utils.checkpointing",
    "transformers.trainer",
    "transformers.training_args",
    "accelerate.accelerator",
    "accelerate.utils.fsdp_utils",
)


class Seams:
    """Applies the ledger to modules as they become complete; the first one has the ledger built.

    Building loads every plugin, and a plugin may import the very modules that are watched, in this thread or
    while another thread holds their import locks. So nobody ever waits here: who comes while somebody is at
    work leaves the module's name, and the one at work takes it along.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.complete: list[str] = []  # modules the ledger has not seen yet
        self.busy = False
        self.ledger: Ledger | None = None
        self.broken: Exception | None = None

    def module_ready(self, module: str) -> None:
        """Apply the patches of a module that is completely imported.

        Raises:
            Exception: the plugins cannot be loaded; raised the first time only, then the host stays stock.
        """
        with self.lock:
            self.complete.append(module)
            if self.busy or self.broken:
                return
            self.busy = True
        try:
            self.work()
        except Exception as error:
            self.broken = error
            raise
        finally:
            self.busy = False

    def work(self) -> None:
        if self.ledger is None:
            self.ledger = build()
        while True:
            with self.lock:
                if not self.complete:
                    self.busy = False
                    return
                module = self.complete.pop(0)
            self.ledger.module_ready(module)


_seams = Seams()


def module_ready(module: str) -> None:
    """Apply the patches of a host module that is completely imported; say once if there can be none."""
    from llamafactory_ascend import _autoload

    try:
        _seams.module_ready(module)
    except Exception as error:
        _autoload.say_off(error)


def ledger() -> "Ledger":
    """Return the ledger of this process with the patches of every plugin in it.

    Raises:
        AscendError: it could not be built.
    """
    from llamafactory_ascend.errors import AscendError

    _seams.module_ready(__name__)  # no patch has this module as its target: only makes sure that it is built
    if _seams.ledger is None:
        raise AscendError(f"the plugin is off in this process: {_seams.broken}", "llamafactory-ascend doctor")
    return _seams.ledger


def build() -> "Ledger":
    """Load the plugins, add their patches to the run's ledger and watch their modules.

    From here on an AscendError can be raised, so its message is given the last word here too.
    """
    from llamafactory_ascend import _autoload, log, plugins, run
    from llamafactory_ascend.errors import AscendError

    log.hide_tracebacks()
    now = run.current()
    hook = plugins.manager().hook
    for patch in (patch for patches in hook.ascend_patches() for patch in patches):
        try:
            now.ledger.add(patch)
        except AscendError as error:
            now.miss("strict", str(error))
    for target in (target for record in now.ledger.records.values() for target in record.patch.targets):
        if target.module not in MODULES:
            _autoload.watch(target.module, module_ready)
    return now.ledger
