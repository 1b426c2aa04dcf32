"""Third-party plugins: which are loaded, and what happens when one of their hooks breaks."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamafactory_ascend import plugins, run, settings
from llamafactory_ascend.errors import AscendError
from tests.fake_host import write_plugin

HOOK = """from llamafactory_ascend import hookimpl
from llamafactory_ascend.errors import AscendError
@hookimpl
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path to install plugins into; manager and run are fresh."""
    monkeypatch.syspath_prepend(tmp_path)
    plugins.manager.cache_clear()
    run.current.cache_clear()
    yield tmp_path
    plugins.manager.cache_clear()
    run.current.cache_clear()
    for name in [name for name in sys.modules if name.endswith("_plugin")]:
        del sys.modules[name]


def messages() -> list[str]:
    return [finding.message for finding in run.current().findings]


def test_installed_plugin_is_found(folder: Path) -> None:
    write_plugin(folder, "good", HOOK + "def ascend_report_sections(run):\n    return {'good': 1}\n")
    found = plugins.manager()
    assert found.has_plugin("good")
    assert {"good": 1} in found.hook.ascend_report_sections(run=run.current())
    assert messages() == []


@pytest.mark.parametrize(
    ("pinned", "loaded"),
    [("all", {"one", "two"}), ("none", set()), ("two", {"two"}), (" one , two ", {"one", "two"})],
)
def test_pinned(folder: Path, monkeypatch: pytest.MonkeyPatch, pinned: str, loaded: set[str]) -> None:
    for name in ("one", "two"):
        write_plugin(folder, name, HOOK + "def ascend_environment(command):\n    return {}\n")
    monkeypatch.setenv(plugins.PINNED, pinned)
    assert {name for name in ("one", "two") if plugins.manager().has_plugin(name)} == loaded
    assert messages() == []


def test_pinned_but_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.PINNED, "missing")
    plugins.manager()
    assert messages() == ["LLAMAFACTORY_ASCEND_PLUGINS names the plugin `missing`, which is not installed"]


def test_name_of_a_built_in_plugin(folder: Path) -> None:
    """It is refused, and the built-in one stays."""
    write_plugin(folder, "checkpointing", HOOK + "def ascend_environment(command):\n    return {'X': '1'}\n")
    found = plugins.manager()
    assert found.get_plugin("checkpointing").__name__ == "llamafactory_ascend.features.checkpointing"
    assert {"X": "1"} not in found.hook.ascend_environment(command="train")
    assert "another plugin is already called `checkpointing`" in messages()[0]


CALLS: dict[str, dict[str, Any]] = {
    "ascend_environment": {"command": "train"},
    "ascend_patches": {},
    "ascend_preflight": {"arguments": None},
    "ascend_report_sections": {},
    "ascend_trainer_callbacks": {"trainer": None},
    "ascend_after_model": {"model": None},
}


def call(hook: str) -> list[Any]:
    import inspect

    from llamafactory_ascend import hookspecs

    takes_run = "run" in inspect.signature(getattr(hookspecs, hook)).parameters
    arguments = {**CALLS[hook], **({"run": run.current()} if takes_run else {})}
    caller = plugins.manager().subset_hook_caller(
        hook, [plugin for name, plugin in plugins.manager().list_name_plugin() if name != "broken"]
    )
    found: list[Any] = caller(**arguments)
    return found


@pytest.mark.parametrize("hook", CALLS)
def test_exception_in_a_hook(folder: Path, hook: str) -> None:
    """A finding with the place it came from; with `strict` an error; an AscendError is one in any case."""
    write_plugin(folder, "broken", HOOK + f"def {hook}():\n    raise KeyError('lost')\n")
    assert call(hook) == []
    place = folder / "broken_plugin.py"
    assert messages() == [
        f"plugin `broken`: {hook} failed: KeyError: 'lost' at {place}:5; the run goes on without it"
    ]
    run.current().settings = settings.read({"strict": True}, "x.yaml")
    with pytest.raises(AscendError) as stop:
        call(hook)
    assert str(stop.value) == f"plugin `broken`: {hook} failed: KeyError: 'lost' at {place}:5"  # it ends here


def test_deliberate_refusal(folder: Path) -> None:
    write_plugin(
        folder, "broken", HOOK + "def ascend_after_model():\n    raise AscendError('no', 'type this')\n"
    )
    with pytest.raises(AscendError, match="no\n  next: type this"):
        call("ascend_after_model")


@pytest.mark.parametrize(
    ("hook", "result", "expected"),
    [
        ("ascend_environment", "{'A': 1}", "dict[str, str]"),
        ("ascend_patches", "['x']", "list[Patch]"),
        ("ascend_preflight", "'fine'", "list[Finding]"),
        ("ascend_report_sections", "[1]", "dict[str, typing.Any]"),
        ("ascend_report_sections", "{'a': {1, 2}}", "Object of type set is not JSON serializable"),
    ],
)
def test_wrong_result(folder: Path, hook: str, result: str, expected: str) -> None:
    write_plugin(folder, "broken", HOOK + f"def {hook}():\n    return {result}\n")
    assert call(hook) == []
    assert len(messages()) == 1
    assert expected in messages()[0]


def test_missed_before_the_settings_were_known(folder: Path) -> None:
    """A plugin that could not be loaded is an error as soon as the recipe turns out to be strict."""
    write_plugin(folder, "broken", "1 / 0\n")
    plugins.manager()
    now = run.current()
    now.judge_early_misses()
    now.settings = settings.read({"strict": True}, "x.yaml")
    with pytest.raises(AscendError, match="plugin `broken` is off: ZeroDivisionError"):
        now.judge_early_misses()


def test_callback_events(folder: Path) -> None:
    """Each event breaks for itself; control objects still come back; the class is still known."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):  # type: ignore[misc]
        calls = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return control

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            Callback.calls += 1
            raise OSError("disk full")

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise AscendError("the adapter is empty")

    callback = plugins.guard_callback("mine", Callback())
    assert isinstance(callback, Callback)
    assert callback.on_step_end(None, None, "control") == "control"
    for _ in range(3):
        assert callback.on_save(None, None, None) is None
    assert Callback.calls == 1
    assert [message.partition(" at ")[0] for message in messages()] == [
        "plugin `mine`: Callback.on_save failed: OSError: disk full"
    ]
    with pytest.raises(AscendError, match="the adapter is empty"):
        callback.on_train_end(None, None, None)


def test_built_in_plugins_all_load() -> None:
    plugins.manager.cache_clear()
    run.current.cache_clear()
    found = plugins.manager()
    assert {name for name, _ in found.list_name_plugin()} >= {
        name.rpartition(".")[2] for name in plugins.BUILT_IN
    }
    assert messages() == []


def test_the_manager_loads_without_transformers() -> None:
    """It is loaded in the middle of the import of Transformers, PEFT or Accelerate."""
    from tests.fake_host import run as run_script

    script = (
        "import sys\nfrom llamafactory_ascend import plugins\nplugins.manager().hook.ascend_patches()\n"
        "heavy = ('transformers', 'peft', 'accelerate', 'llamafactory', 'trl')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert run_script(script=script).out == "[]\n"


def test_settings_of_a_plugin_that_is_switched_off_are_no_mistake(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plugin(folder, "one", HOOK + "def ascend_environment(command):\n    return {}\n")
    monkeypatch.setenv(plugins.PINNED, "none")
    plugins.check_names(["one"], lambda _: "x.yaml")
    with pytest.raises(AscendError, match=r"x\.yaml: `ascend\.plugins\.on`: .*did you mean `one`"):
        plugins.check_names(["on"], lambda _: "x.yaml")


def test_a_plugin_that_is_off_is_said_in_one_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plugin(folder, "broken", "1 / 0\n")
    plugins.manager()
    assert capsys.readouterr().err.startswith("[llamafactory-ascend] plugin `broken` is off: ")
