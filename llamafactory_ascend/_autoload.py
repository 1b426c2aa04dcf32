"""The door into the process: ``import torch`` calls :func:`autoload` through the group ``torch.backends``.

An exception here would make ``import torch`` fail for every user of the machine, so nothing may escape, and
nothing may be slow: until ``llamafactory`` itself is imported this module only leaves a watcher on
``sys.meta_path``. Standard library only; wrapt is imported once the host is there.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HOST = "llamafactory"
SWITCH = "LLAMAFACTORY_ASCEND"
LAUNCHED = "LLAMAFACTORY_ASCEND_RUN"  # the launcher sets it for its ranks

Ready = Callable[[str], None]


def say(message: str) -> None:
    """Print one line on stderr, once per node: the logging of the host may not exist yet."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(Exception):  # a closed stderr is no reason to lose a run
            print(f"[llamafactory-ascend] {' '.join(message.split())}", file=sys.stderr, flush=True)


def say_off(error: Exception) -> None:
    """Say in one line that the host stays stock, and why."""
    say(f"off: {type(error).__name__}: {error}. Training runs as stock; try: llamafactory-ascend doctor")


def is_switched_off() -> bool:
    """True where ``LLAMAFACTORY_ASCEND`` is 0, false, off or no."""
    return os.environ.get(SWITCH, "").strip().lower() in {"0", "false", "off", "no"}


def say_misunderstood_switch() -> None:
    """Name a value of LLAMAFACTORY_ASCEND that means nothing; once, by the launcher where there is one."""
    value = os.environ.get(SWITCH, "").strip()
    if value.lower() not in {"", "1", "true", "on", "yes"} and LAUNCHED not in os.environ:
        say(f"{SWITCH}={value} is not understood, the plugin stays on; 0 switches it off")


def autoload() -> None:
    """Watch for the host; called by ``import torch``. Never raises, never imports torch."""
    try:
        if not is_switched_off() and not any(isinstance(finder, Watcher) for finder in sys.meta_path):
            watcher = Watcher()
            sys.meta_path.insert(0, watcher)
            if sys.modules.get(HOST) is not None:
                watcher.activate()
    except Exception as error:
        say(f"off: {type(error).__name__} while starting: {error}")


class Watcher:
    """A finder that finds nothing: it sees imports go by and starts the plugin when the host appears."""

    def __init__(self) -> None:
        self.active = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not self.active and (name == HOST or name.startswith(HOST + ".")):
            self.activate()
        return None

    def activate(self) -> None:
        """Hook the host's modules. One line on stderr and an untouched host if that is impossible."""
        self.active = True
        say_misunderstood_switch()
        try:
            import wrapt  # noqa: F401  # missing, it must be missed before the first module is hooked

            from llamafactory_ascend.host import seams

            for module in seams.MODULES:
                watch(module, seams.module_ready)
        except Exception as error:
            say_off(error)


def watch(name: str, ready: Ready) -> None:
    """Call ``ready(name)`` as soon as the module is completely imported, at once if it is.

    A module may be met half imported: under torchrun the host imports torch, and torch calls us, from the
    first line of ``train/tuner.py``; a script may import any host module before torch.
    """
    import wrapt

    wrapt.register_post_import_hook(lambda module: _when_complete(module, name, ready), name)


def _when_complete(module: ModuleType, name: str, ready: Ready) -> None:
    spec = getattr(module, "__spec__", None)
    if not getattr(spec, "_initializing", False):
        _call(ready, name)
    elif type(spec) not in (ModuleSpec, CompletingSpec):
        say(f"off for {name}: it is half imported, and its {type(spec).__name__} cannot tell when it is done")
    else:
        assert spec is not None

        def completed() -> None:
            if sys.modules.get(name) is module:
                _call(ready, name)
            else:
                watch(name, ready)  # its import failed; somebody may try again

        spec.__dict__.setdefault("_completed", []).append(completed)
        spec.__class__ = CompletingSpec
        if not getattr(spec, "_initializing", False):  # another thread finished it between our two looks
            spec._initializing = False  # type: ignore[attr-defined]


class CompletingSpec(ModuleSpec):
    """The spec of a half imported module: importlib sets ``_initializing`` to False when the module is done.

    The import statement that waits for the module has not bound a name of it yet, so whoever writes
    ``from module import function`` already gets what the patches have put there.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            waiting = self.__dict__.pop("_completed", [])
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            for completed in waiting:
                completed()


def _call(ready: Ready, name: str) -> None:
    try:
        ready(name)
    except Exception as error:
        say(f"off for {name}: {type(error).__name__}: {error}. Try: llamafactory-ascend doctor")
