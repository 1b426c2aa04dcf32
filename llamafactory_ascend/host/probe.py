"""Looks at an installation from a process of its own: ``python -P -m llamafactory_ascend.host.probe FILE``.

Importing torch, Transformers or the host can fail or even kill the process, which is what ``doctor`` wants to
know. Every stage is appended to FILE as one JSON line when it begins and again when it is done, so the reader
sees how far the process came.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from llamafactory_ascend import _autoload

# What a run imports before the host's own modules: a failure is named after the first that fails.
LIBRARIES = ("transformers", "peft", "accelerate", "llamafactory")


class Log:
    """The stages of one probe, appended to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **entry: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")  # ASCII: a path may be no text in any encoding

    def stage(self, name: str, look: Callable[[], Any]) -> bool:
        """Record what ``look`` returns, or the exception that it ends with.

        Returns:
            True unless it failed.
        """
        self.write(stage=name, state="begun")
        try:
            self.write(stage=name, state="done", value=look())
        except BaseException as error:  # SystemExit too: some libraries leave that way
            text = f"{type(error).__name__}: {error}"
            self.write(stage=name, state="failed", error=text, frame=_last_frame(error))
            return False
        return True


def _last_frame(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def probe(log: Log) -> None:
    """Import torch, the libraries and what the patches replace; record device, plugins, patches, findings."""
    if not log.stage("torch", _torch):
        return
    log.stage("device", _device)
    # A plugin that is off is switched on here, so that its patches can be judged before it is.
    os.environ.pop(_autoload.SWITCH, None)
    _autoload.autoload()
    if not all(log.stage(name, partial(_import, name)) for name in LIBRARIES):
        return
    log.stage("versions", _versions)
    if log.stage("plugins", _plugins):
        log.stage("environment", _environment)
        for name in _targets():
            log.stage(name, partial(_import_target, name))
        log.stage("patches", _patches)
    log.stage("findings", _findings)


def _torch() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    active = any(isinstance(finder, _autoload.Watcher) for finder in sys.meta_path)
    return {"version": str(torch.__version__), "active": active}


def _import(name: str) -> None:
    importlib.import_module(name)


def _import_target(name: str) -> None:
    """Import a module that holds a patch's target; versions of the host that lack it are no failure."""
    try:
        _import(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if "." not in missing or not f"{name}.".startswith(f"{missing}."):
            raise


def _device() -> dict[str, Any]:
    from llamafactory_ascend import device

    return asdict(device.decide())


def _versions() -> dict[str, str]:
    from llamafactory_ascend.host.versions import versions

    return versions()


def _plugins() -> list[str]:
    """Build the ledger, which loads every plugin, and return the names of the third-party ones."""
    from llamafactory_ascend import plugins
    from llamafactory_ascend.host import seams

    seams.ledger()
    built_in = {name.rpartition(".")[2] for name in plugins.BUILT_IN}
    return [name for name, _plugin in plugins.manager().list_name_plugin() if name not in built_in]


def _environment() -> dict[str, str]:
    """Return what the plugins set when a training starts, where the shell does not."""
    from llamafactory_ascend import plugins

    found: dict[str, str] = {}
    for defaults in plugins.manager().hook.ascend_environment(command="train"):
        for name, value in defaults.items():
            found.setdefault(name, value)
    return found


def _targets() -> list[str]:
    from llamafactory_ascend.host import seams

    records = seams.ledger().records.values()
    return list(dict.fromkeys(target.module for record in records for target in record.patch.targets))


def _patches() -> list[dict[str, Any]]:
    from llamafactory_ascend.host import seams

    ledger = seams.ledger()
    ledger.verify()
    return [record.as_dict() for record in ledger.records.values()]


def _findings() -> list[dict[str, Any]]:
    from llamafactory_ascend import run

    return [asdict(finding) for finding in run.current().findings]


if __name__ == "__main__":
    probe(Log(Path(sys.argv[1])))
