"""The plugin manager: what is built in, what third parties install, and a trace of every hook call.

What a third party's hook raises is a finding and not the end of a run (unless it is an AscendError, a
deliberate refusal, or the recipe is strict). The same holds for built-in hooks that only observe.
"""

import difflib
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pluggy

from llamafactory_ascend import __version__, hookspecs, log, run
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.kernels.backends import Backend
from llamafactory_ascend.patching import Patch

DISTRIBUTION = "llamafactory-ascend-plugin"
GROUP = "llamafactory_ascend"
PINNED = "LLAMAFACTORY_ASCEND_PLUGINS"
OLDEST_PLUGGY = (1, 5)

BUILT_IN = (
    "llamafactory_ascend.host.plugin",
    "llamafactory_ascend.features.environment",
    "llamafactory_ascend.features.devices",
    "llamafactory_ascend.features.precision",
    "llamafactory_ascend.features.quantization",
    "llamafactory_ascend.features.data_loading",
    "llamafactory_ascend.features.data_checks",
    "llamafactory_ascend.features.tokenized",
    "llamafactory_ascend.features.trained_lengths",
    "llamafactory_ascend.features.attention",
    "llamafactory_ascend.features.nan_guard",
    "llamafactory_ascend.features.oft_arguments",
    "llamafactory_ascend.features.kernels",
    "llamafactory_ascend.features.loss",
    "llamafactory_ascend.features.targets",
    "llamafactory_ascend.features.checkpointing",
    "llamafactory_ascend.features.oft",
    "llamafactory_ascend.features.gradient_audit",
    "llamafactory_ascend.features.sharding",
    "llamafactory_ascend.features.resuming",
    "llamafactory_ascend.features.evaluation",
    "llamafactory_ascend.features.stopping",
    "llamafactory_ascend.features.adapter",
    "llamafactory_ascend.features.memory",
    "llamafactory_ascend.features.stress",
)
ELEMENTS: dict[str, type] = {  # what the list or the mapping that a hook returns must hold
    "ascend_patches": Patch,
    "ascend_preflight": run.Finding,
    "ascend_dataset_info": Path,
    "ascend_environment": str,
    "ascend_kernels": Backend,
}
# Built-in hooks that change nothing: one that breaks is a finding. The others change the run before it
# starts, and half a change is worse than a stop.
OBSERVING = {
    "ascend_dataset_info",
    "ascend_preflight",
    "ascend_trainer_callbacks",
    "ascend_saved",
    "ascend_report_sections",
}


@functools.cache
def manager() -> pluggy.PluginManager:
    """Return the manager of this process, with every plugin registered and every hook name checked.

    Raises:
        AscendError: pluggy is too old.
    """
    if tuple(int(part) for part in pluggy.__version__.split(".")[:2]) < OLDEST_PLUGGY:
        raise AscendError(f"pluggy {pluggy.__version__} is too old", "pip install -U 'pluggy>=1.5'")
    _compare_versions()
    found = pluggy.PluginManager(hookspecs.PROJECT)
    found.add_hookspecs(hookspecs)
    for name in BUILT_IN:
        _register(found, name.rpartition(".")[2], functools.partial(importlib.import_module, name), OBSERVING)
    every_hook = {name for name in vars(hookspecs) if name.startswith("ascend_")}
    for entry in third_party():
        _register(found, entry.name, entry.load, every_hook)
    if log.is_tracing():
        _trace(found)
    return found


def _compare_versions() -> None:
    try:
        installed = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return  # run from a source tree
    if installed != __version__:
        where = Path(__file__).parent
        run.current().miss(
            "strict",
            f"pip has {DISTRIBUTION} {installed}, but version {__version__} is imported from {where}",
            f"pip install -U {DISTRIBUTION}, or take that directory off PYTHONPATH",
        )


def third_party() -> list[importlib.metadata.EntryPoint]:
    """Return the entry points of the group, or those of them that LLAMAFACTORY_ASCEND_PLUGINS names."""
    pinned = os.environ.get(PINNED, "all").strip()
    entries = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name)
    if pinned == "all":
        return entries
    wanted = {name.strip() for name in pinned.split(",")} - {"none", ""}
    for name in sorted(wanted - {entry.name for entry in entries}):
        run.current().miss("strict", f"{PINNED} names the plugin `{name}`, which is not installed")
    return [entry for entry in entries if entry.name in wanted]


def check_names(names: Iterable[str], where: Callable[[str], str]) -> None:
    """Refuse settings for a plugin that is not installed; one that is switched off may keep its own.

    Args:
        names: the keys of ``ascend.plugins``.
        where: dotted key -> the place it was written, for the message.

    Raises:
        AscendError: a name that no installed plugin has, with the nearest one that does.
    """
    installed = sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})
    for name in names:
        if name not in installed:
            key, near = f"ascend.plugins.{name}", difflib.get_close_matches(name, installed, n=1)
            known = f"installed: {', '.join(installed)}" if installed else "none is installed"
            raise AscendError(
                f"{where(key)}: `{key}`: there is no plugin `{name}`: "
                + (f"did you mean `{near[0]}`?" if near else known),
                "install it, or remove its settings",
            )


def _register(found: pluggy.PluginManager, name: str, load: Callable[[], Any], guarded: set[str]) -> None:
    """Load and register one plugin; one that cannot be is named and left out, and the others stay."""
    if found.has_plugin(name):
        _refuse(name, f"another plugin is already called `{name}`")
        return
    try:
        plugin = load()
        found.register(plugin, name=name)
        found.check_pending()
        hooks = [caller for caller in found.get_hookcallers(plugin) or [] if caller.name in vars(hookspecs)]
        if not hooks:
            raise AscendError("it implements no hook; is `@llamafactory_ascend.hookimpl` missing?")
        for caller in hooks:
            for implementation in caller.get_hookimpls():
                if implementation.plugin_name == name:
                    if implementation.wrapper or implementation.hookwrapper:
                        raise AscendError(
                            f"its {caller.name} wraps the hooks of others, which is not supported"
                        )
                    if caller.name in guarded:
                        function = _guard(name, caller.name, implementation.function)
                        implementation.function = function  # type: ignore[misc]
    except (Exception, SystemExit) as error:  # a script that was not meant to be imported may call sys.exit()
        if found.has_plugin(name):
            found.unregister(name=name)
        _refuse(name, f"{type(error).__name__}: {error}")


def _refuse(name: str, cause: str) -> None:
    reason = " ".join(cause.split())
    run.current().miss(
        "strict", f"plugin `{name}` is off: {reason}", f"update or uninstall it, or set {PINNED}=none"
    )


def _guard(plugin: str, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any) -> Any:
        return run.current().attempt(
            f"plugin `{plugin}`: {hook}", lambda: _checked(plugin, hook, function(*args))
        )

    return guarded


def _checked(plugin: str, hook: str, result: Any) -> Any:
    """Return a hook's result if it is what the hook promises, so that nothing breaks far from its cause.

    Raises:
        TypeError: it is something else.
    """
    expected = inspect.signature(getattr(hookspecs, hook)).return_annotation
    if result is None or expected is None:
        return None
    kind = {"list": list, "dict": dict}[str(expected).partition("[")[0]]
    items = result.values() if isinstance(result, dict) else result
    if not isinstance(result, kind) or not all(
        isinstance(item, ELEMENTS.get(hook, object)) for item in items
    ):
        raise TypeError(f"returned {result!r}, not {expected}")
    if hook == "ascend_report_sections":
        json.dumps(result)
    if hook == "ascend_trainer_callbacks":
        from transformers import TrainerCallback

        kinds = [each if isinstance(each, type) else type(each) for each in result]
        if not all(issubclass(each, TrainerCallback) for each in kinds):
            raise TypeError(f"returned {result!r}, not {expected}")
        return [guard_callback(plugin, callback) for callback in result]
    return result


def guard_callback(plugin: str, callback: Any) -> Any:
    """Make a TrainerCallback's events harmless: one that raises is reported and not called again.

    The object itself is changed, so that ``isinstance`` and ``Trainer.remove_callback`` still know it.

    Returns:
        The callback; an instance where a class was given, as the Trainer allows.
    """
    callback = callback() if isinstance(callback, type) else callback
    for event in dir(callback):
        if event.startswith("on_"):
            setattr(
                callback,
                event,
                _guard_event(f"plugin `{plugin}`: {type(callback).__name__}.{event}", callback, event),
            )
    return callback


def _guard_event(what: str, callback: Any, event: str) -> Callable[..., Any]:
    method = getattr(callback, event)
    broken = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal broken
        broken = True  # until it has returned
        result = method(*args, **kwargs)
        broken = False
        return result

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return None if broken else run.current().attempt(what, call, *args, **kwargs)

    return guarded


def _trace(found: pluggy.PluginManager) -> None:
    """Print a line for each hook call: rank, hook, the plugins asked, what came of it, milliseconds."""
    started: list[float] = []

    def before(_name: str, _implementations: Any, _arguments: Any) -> None:
        started.append(time.perf_counter())

    def after(outcome: Any, name: str, implementations: Any, _arguments: Any) -> None:
        asked = (
            ", ".join(implementation.plugin_name for implementation in reversed(implementations)) or "nobody"
        )
        error = outcome.exception
        came = f"{type(error).__name__}" if error else f"{len(outcome.get_result() or [])} results"
        elapsed = (time.perf_counter() - started.pop()) * 1000
        rank = os.environ.get("RANK", "0")
        print(
            f"[llamafactory-ascend] rank {rank}: {name} -> {asked}: {came}, {elapsed:.1f} ms", file=sys.stderr
        )

    found.add_hookcall_monitoring(before, after)
