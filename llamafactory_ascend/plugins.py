"""The plugin manager: what is built in, what third parties install, and a trace of every hook call."""

import functools
import importlib
import importlib.metadata
import os
import sys
from typing import Any

import pluggy

from llamafactory_ascend import hookspecs, log

GROUP = "llamafactory_ascend"
PINNED = "LLAMAFACTORY_ASCEND_PLUGINS"
TRACE = "LLAMAFACTORY_ASCEND_TRACE"

BUILT_IN = (
    "llamafactory_ascend.host.plugin",
    "llamafactory_ascend.features.environment",
    "llamafactory_ascend.features.checkpointing",
    "llamafactory_ascend.features.memory",
)


@functools.cache
def manager() -> pluggy.PluginManager:
    """Return the manager of this process, with every plugin registered and every hook name checked."""
    found = pluggy.PluginManager(hookspecs.PROJECT)
    found.add_hookspecs(hookspecs)
    for name in BUILT_IN:
        found.register(importlib.import_module(name), name=name.rpartition(".")[2])
    for name, plugin in third_party():
        _register(found, name, plugin)
    if os.environ.get(TRACE, "").lower() in {"1", "true", "on", "yes"}:
        found.trace.root.setwriter(lambda text: print(text, end="", file=sys.stderr))
        found.enable_tracing()
    return found


def third_party() -> list[tuple[str, Any]]:
    """Load the plugins of the entry point group, or those that LLAMAFACTORY_ASCEND_PLUGINS names.

    One that cannot be loaded is reported by name and left out: it must not stop the others or the run.
    """
    pinned = os.environ.get(PINNED, "all").strip()
    wanted = None if pinned == "all" else {name.strip() for name in pinned.split(",")} - {"none", ""}
    plugins = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        if wanted is None or entry.name in wanted:
            try:
                plugins.append((entry.name, entry.load()))
            except Exception as error:
                log.warn(_refusal(entry.name, f"{type(error).__name__}: {error}"))
    missing = (wanted or set()) - {entry.name for entry in importlib.metadata.entry_points(group=GROUP)}
    for name in sorted(missing):
        log.warn(f"{PINNED} names the plugin `{name}`, which is not installed")
    return plugins


def _register(found: pluggy.PluginManager, name: str, plugin: Any) -> None:
    try:
        found.register(plugin, name=name)
        found.check_pending()
    except Exception as error:
        if found.has_plugin(name):
            found.unregister(name=name)
        log.warn(_refusal(name, str(error)))


def _refusal(name: str, cause: str) -> str:
    return f"plugin `{name}` is off\n  cause: {cause}\n  next: uninstall or update it, or set {PINNED}=none"
