"""The door into the process: ``import torch`` calls :func:`autoload` through the group ``torch.backends``.

An exception here would make ``import torch`` fail for every user of the machine, so nothing may escape, and
nothing may be slow: until ``llamafactory`` itself is imported this module only leaves a watcher on
``sys.meta_path``. Standard library only; wrapt is imported once the host is there.
"""

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HOST = "llamafactory"
SWITCH = "LLAMAFACTORY_ASCEND"

Ready = Callable[[str], None]


def say(message: str) -> None:
    """Print one line on stderr, once per node: the logging of the host may not exist yet."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            print(f"[llamafactory-ascend] {message}", file=sys.stderr, flush=True)
        except Exception:  # a closed stderr is no reason to lose a run
            pass


def is_switched_off() -> bool:
    return os.environ.get(SWITCH, "").strip().lower() in {"0", "false", "off", "no"}


def autoload() -> None:
    """Watch for the host; called by ``import torch``. Never raises, never imports torch."""
    try:
        if not is_switched_off() and not any(isinstance(finder, Watcher) for finder in sys.meta_path):
            watcher = Watcher()
            sys.meta_path.insert(0, watcher)
            if HOST in sys.modules:
                watcher.activate()
    except Exception as error:
        say(f"off: {type(error).__name__} while starting: {error}")


class Watcher:
    """A finder that finds nothing: it sees imports go by.

    It starts the plugin when the host appears, and it reports a module that was half imported when it was
    first watched as soon as that module is complete (under torchrun the host imports torch from the first
    line of ``train/tuner.py``, so an entry point may meet any host module half built).
    """

    def __init__(self) -> None:
        self.active = False
        self.half_imported: list[tuple[str, Ready]] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not self.active and (name == HOST or name.startswith(HOST + ".")):
            self.activate()
        if self.half_imported:
            self.settle()
        return None

    def activate(self) -> None:
        """Hook the host's modules. One line on stderr and an untouched host if that is impossible."""
        self.active = True
        try:
            from llamafactory_ascend.host import seams

            for module in seams.MODULES:
                self.watch(module, seams.module_ready)
        except Exception as error:
            say(f"off: {type(error).__name__}: {error}. Training runs as stock; try: llamafactory-ascend doctor")

    def watch(self, name: str, ready: Ready) -> None:
        """Call ``ready(name)`` once the module is completely imported: now, at its import, or when done."""
        module = sys.modules.get(name)
        if module is not None and is_half_imported(module):
            self.half_imported.append((name, ready))
            return
        import wrapt

        wrapt.register_post_import_hook(lambda _module: call(ready, name), name)

    def settle(self) -> None:
        """Report the modules that have become complete since they were first met."""
        waiting, self.half_imported = self.half_imported, []
        for name, ready in waiting:
            module = sys.modules.get(name)
            if module is None or is_half_imported(module):
                self.half_imported.append((name, ready))
            else:
                call(ready, name)


def call(ready: Ready, name: str) -> None:
    try:
        ready(name)
    except Exception as error:
        say(f"off for {name}: {type(error).__name__}: {error}. Try: llamafactory-ascend doctor")


def is_half_imported(module: ModuleType) -> bool:
    # CPython marks the spec while the module's body runs; importlib itself reads the same attribute.
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def watcher() -> Watcher:
    """Return the watcher of this process.

    Raises:
        LookupError: the plugin is off in this process.
    """
    for finder in sys.meta_path:
        if isinstance(finder, Watcher):
            return finder
    raise LookupError(f"llamafactory_ascend is not active here: {SWITCH}=0, or torch was not imported")
