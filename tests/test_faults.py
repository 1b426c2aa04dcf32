"""Whatever breaks, torch and the host still work, and one line says what is off."""

import os
from pathlib import Path

import pytest

from tests.fake_host import HOST, SEAMS, STATES, TORCH, run, write, write_plugin

HOOK = "from llamafactory_ascend import hookimpl\n@hookimpl\n"
GOOD = HOOK + "def ascend_environment(command):\n    return {'GOOD': '1'}\n"
IMPORT = "import torch\nfrom llamafactory import launcher\nprint(launcher.launch())\n"

PATCHES = (  # of the functions that the fake host has
    "launcher.launch",
    "arguments.read",
    "arguments.parse",
    "arguments.train",
    "arguments.parse_v1",
    "model.load",
    "checkpointing.enable",
    "training.run",
)


@pytest.fixture
def light(tmp_path: Path) -> Path:
    """The fake host on the fake torch: nothing but the import machinery is real."""
    return write(tmp_path, {**HOST, "torch/__init__.py": TORCH})


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """The fake host on the real torch, so that the built-in plugins load."""
    return write(tmp_path, HOST)


def test_wrapt_missing(light: Path) -> None:
    write(light, {"wrapt.py": "raise ModuleNotFoundError(\"No module named 'wrapt'\")\n"})
    result = run(light, script=IMPORT)
    assert (result.code, result.out) == (0, "launched\n")
    assert len(result.lines) == 1
    assert "off: ModuleNotFoundError: No module named 'wrapt'. Training runs as stock" in result.lines[0]


@pytest.mark.parametrize("package", ["pluggy", "pydantic", "yaml"])
def test_dependency_missing(light: Path, package: str) -> None:
    write(light, {f"{package}.py": f"raise ModuleNotFoundError(\"No module named '{package}'\")\n"})
    script = IMPORT + "import llamafactory.hparams.parser, llamafactory.model.loader\nprint('all imported')\n"
    result = run(light, script=script)
    assert (result.code, result.out) == (0, "launched\nall imported\n")
    assert [package in line and "Training runs as stock" in line for line in result.lines] == [True]


def test_pluggy_too_old(light: Path) -> None:
    write(light, {"pluggy.py": OLD_PLUGGY})
    result = run(light, script=IMPORT)
    assert (result.code, result.out) == (0, "launched\n")
    assert len(result.lines) == 1
    assert "pluggy 0.13.1 is too old next: pip install -U 'pluggy>=1.5'" in result.lines[0]


OLD_PLUGGY = """
__version__ = "0.13.1"
class HookspecMarker:
    def __init__(self, name): pass
    def __call__(self, function): return function
HookimplMarker = HookspecMarker
class PluginManager: pass
"""


def test_host_absent(light: Path) -> None:
    script = (
        "import importlib.abc, sys, torch\n"
        "class Hidden(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'llamafactory': raise ModuleNotFoundError(\"No module named 'llamafactory'\")\n"
        "sys.meta_path.insert(1, Hidden())\n"
        "try:\n    import llamafactory\nexcept ModuleNotFoundError as error:\n    print(error)\n"
        "print('wrapt' in sys.modules, 'llamafactory_ascend.plugins' in sys.modules)\n"
    )
    result = run(light, script=script)
    assert (result.code, result.lines) == (0, [])
    assert result.out == "No module named 'llamafactory'\nTrue False\n"


def test_torch_alone_loads_nothing(light: Path) -> None:
    script = (
        "import sys\nbefore = set(sys.modules)\nimport torch\n"
        "new = set(sys.modules) - before\n"
        "print(sorted(m for m in new if m.startswith(('llamafactory', 'wrapt', 'plug'))))"
    )
    assert run(light, script=script).out == "['llamafactory_ascend', 'llamafactory_ascend._autoload']\n"


def test_host_raises_while_imported(host: Path) -> None:
    """The host's own error comes through, and the second try, which works, is patched like a first."""
    parser = HOST["llamafactory/hparams/parser.py"]
    write(
        host,
        {"llamafactory/hparams/parser.py": parser + "import os\nif os.environ.pop('BREAK', ''): 1 / 0\n"},
    )
    script = (
        "try:\n    import llamafactory.hparams.parser\nexcept ZeroDivisionError:\n    print('host error')\n"
        "import llamafactory.hparams.parser\n" + STATES
    )
    result = run(host, script=script, BREAK="1")
    assert result.code == 0, result.err
    assert result.out.startswith("host error\n")
    assert result.states["arguments.train"][0] == "applied"


@pytest.mark.parametrize("module", SEAMS)
def test_partial_import(host: Path, module: str) -> None:
    """Whichever host module is imported first, and imports torch: all are patched, early names too."""
    name = SEAMS[module]
    script = (
        f"from {module} import {name} as early\n"
        + "".join(f"import {other}\n" for other in SEAMS)
        + f"import {module} as module\nprint(early is module.{name}, hasattr(early, '__wrapped__'))\n"
        + "from llamafactory.train import tuner\nfrom llamafactory import hparams\n"
        + "print(tuner.get_train_args is hparams.get_train_args is hparams.parser.get_train_args)\n"
        + STATES
    )
    result = run(host, script=script)
    assert result.code == 0, result.err
    assert result.out.startswith("True True\nTrue\n")
    assert {name: result.states[name][0] for name in PATCHES} == dict.fromkeys(PATCHES, "applied")


def test_reentrant_import(host: Path) -> None:
    """A plugin that imports the host while the plugins are being loaded: every patch still lands, once."""
    write_plugin(host, "eager", "import llamafactory.model.loader, llamafactory.launcher\n" + GOOD)
    result = run(host, script="import llamafactory.hparams.parser\n" + STATES)
    assert (result.code, result.lines) == (0, []), result.err
    assert result.states["arguments.train"][0] == "applied"
    assert result.states["launcher.launch"][0] == result.states["model.load"][0] == "applied"


def test_torch_in_a_thread(host: Path) -> None:
    """Torch, and with it the entry point, in one thread while another is importing the host."""
    write(
        host,
        {
            "llamafactory/hparams/parser.py": (
                "import builtins\nbuiltins.inside.set()\nbuiltins.go.wait(60)\n"
                + HOST["llamafactory/hparams/parser.py"]
            )
        },
    )
    script = (
        "import builtins, threading\n"
        "builtins.inside, builtins.go = threading.Event(), threading.Event()\n"
        "def other():\n    builtins.inside.wait(60)\n    import torch\n    builtins.go.set()\n"
        "thread = threading.Thread(target=other); thread.start()\n"
        "from llamafactory.hparams.parser import get_train_args\n"
        "thread.join()\nprint(hasattr(get_train_args, '__wrapped__'))\n" + STATES
    )
    result = run(host, script=script)
    assert (result.code, result.lines) == (0, []), result.err
    assert result.out.startswith("True\n")
    assert result.states["arguments.train"][0] == "applied"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        (
            HOOK + "def ascend_environment(command, colour): ...\n",
            "hook 'ascend_environment' hookimpl definition: ascend_environment(command, colour) "
            "Argument(s) {'colour'} are declared in the hookimpl but can not be found in the hookspec",
        ),
        (
            "from llamafactory_ascend import hookimpl\n@hookimpl\ndef ascend_enviroment(command): ...\n",
            "unknown hook 'ascend_enviroment'",
        ),
        (
            "def ascend_environment(command): ...\n",
            "it implements no hook; is `@llamafactory_ascend.hookimpl` missing?",
        ),
        (
            "from llamafactory_ascend import hookimpl\n@hookimpl(wrapper=True)\n"
            "def ascend_environment(command):\n    return (yield)\n",
            "its ascend_environment wraps the hooks of others",
        ),
    ],
    ids=["raises", "exits", "arguments", "unknown-hook", "no-hook", "wrapper"],
)
def test_broken_plugin(host: Path, code: str, cause: str) -> None:
    write_plugin(host, "broken", code)
    write_plugin(host, "good", GOOD)
    script = (
        "import llamafactory.hparams.parser, os\nfrom llamafactory_ascend.host import arguments\n"
        "arguments.fill_environment('train')\nprint(os.environ.get('GOOD'))\n" + STATES
    )
    result = run(host, script=script)
    assert result.code == 0, result.err
    assert result.out.startswith("1\n"), "the other plugin works"
    assert len(result.lines) == 1
    assert "plugin `broken` is off: " in result.lines[0]
    assert cause in result.lines[0]
    assert "LLAMAFACTORY_ASCEND_PLUGINS=none" in result.lines[0]
    assert result.states["arguments.train"][0] == "applied"


def test_another_version_first_on_the_path(host: Path) -> None:
    """The metadata is of one version, the package that is found of another."""
    metadata = "Metadata-Version: 2.1\nName: llamafactory-ascend-plugin\nVersion: 9.9\n"
    entry = "[torch.backends]\nllamafactory_ascend = llamafactory_ascend._autoload:autoload\n"
    folder = "llamafactory_ascend_plugin-9.9.dist-info"
    write(host, {f"{folder}/METADATA": metadata, f"{folder}/entry_points.txt": entry})
    result = run(host, script="import llamafactory.hparams.parser\n" + STATES)
    assert result.code == 0
    assert len(result.lines) == 1
    assert "pip has llamafactory-ascend-plugin 9.9, but version 0.1.0 is imported from" in result.lines[0]
    assert result.states["arguments.train"][0] == "applied"


@pytest.mark.parametrize(
    ("old", "new", "state", "reason"),
    [
        ("def load_model(", "def load(", "failed", "llamafactory.model.loader:load_model does not exist"),
        (
            "finetuning_args, is",
            "peft_args, is",
            "failed",
            "refused: parameters are ('tokenizer', 'model_args', 'peft_args'",
        ),
        (
            "'model'",
            "'other'",
            "applied",
            "untested: the source of llamafactory.model.loader:load_model changed since",
        ),
    ],
    ids=["gone", "signature", "source"],
)
def test_target_changed(host: Path, old: str, new: str, state: str, reason: str) -> None:
    """One patch that cannot be applied leaves the others alone, and the host's function as it is."""
    write(host, {
        "llamafactory/model/loader.py": HOST["llamafactory/model/loader.py"].replace(old, new),
        "llamafactory/model/__init__.py": "",
    })  # fmt: skip
    result = run(host, script="import llamafactory.model.loader, llamafactory.launcher\n" + STATES)
    assert result.code == 0, result.err
    assert result.states["model.load"][0] == state
    assert result.states["model.load"][1].startswith(reason)
    assert result.states["launcher.launch"][0] == "applied"


def test_other_startup_hooks(host: Path) -> None:
    """sitecustomize imports torch, another finder is in front, others hook the same module with wrapt."""
    write(
        host,
        {
            "sitecustomize.py": (
                "import torch, sys, importlib.abc, wrapt\n"
                "class Other(importlib.abc.MetaPathFinder):\n"
                "    def find_spec(self, name, path=None, target=None): return None\n"
                "sys.meta_path.insert(0, Other())\n"
                "wrapt.register_post_import_hook(lambda m: print('their hook', m.get_train_args.__name__),"
                " 'llamafactory.hparams.parser')\n"
            )
        },
    )
    result = run(host, script="from llamafactory.hparams.parser import get_train_args\n" + STATES)
    assert (result.code, result.lines) == (0, []), result.err
    assert result.out.startswith("their hook get_train_args\n")
    assert result.states["arguments.train"][0] == "applied"


def test_nothing_is_written(light: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Home and working directory may be read-only: nothing is written (root could, so both are watched)."""
    home, here = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("cwd")
    script = f"import os\nos.chdir({str(here)!r})\n" + IMPORT
    result = run(light, script=script, HOME=str(home), PYTHONDONTWRITEBYTECODE="1")
    assert (result.code, result.out) == (0, "launched\n")
    assert list(home.iterdir()) == list(here.iterdir()) == []


def test_closed_stderr(light: Path) -> None:
    write(light, {"wrapt.py": "raise ImportError('no')\n"})
    assert run(light, script="import sys\nsys.stderr.close()\n" + IMPORT).out == "launched\n"


@pytest.mark.parametrize(("value", "lines"), [("banana", 1), ("1", 0), ("TRUE", 0), ("", 0)])
def test_a_switch_that_is_not_understood_is_named_once(light: Path, value: str, lines: int) -> None:
    script = IMPORT + "import llamafactory.hparams.parser\n"
    write(light, {"wrapt.py": "def register_post_import_hook(*_): ...\n"})
    result = run(light, script=script, LLAMAFACTORY_ASCEND=value)
    assert result.code == 0
    said = [line for line in result.lines if "LLAMAFACTORY_ASCEND=banana is not understood" in line]
    assert len(said) == len(result.lines) == lines
    ranks = run(light, script=script, LLAMAFACTORY_ASCEND=value, LLAMAFACTORY_ASCEND_RUN="abc")
    assert ranks.lines == []


REFUSAL = """
from llamafactory_ascend.host import seams
from llamafactory_ascend.errors import AscendError
seams.ledger()
seams.ledger()
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "trace", "frames"),
    [
        ("AscendError('it cannot be', 'type this')", "", False),
        ("AscendError('it cannot be', 'type this')", "1", True),
        ("ValueError('of another kind')", "", True),
    ],
)
def test_a_refusal_prints_no_frames(host: Path, error: str, trace: str, frames: bool) -> None:
    result = run(host, script=REFUSAL.format(error=error), LLAMAFACTORY_ASCEND_TRACE=trace)
    assert result.code == 1
    assert ("Traceback" in result.err) is frames
    if not frames:
        assert result.err == "[llamafactory-ascend] it cannot be\n  next: type this\n"


@pytest.mark.parametrize("switch", [{"LLAMAFACTORY_ASCEND": "0"}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}])
def test_switched_off(light: Path, switch: dict[str, str]) -> None:
    script = IMPORT + "import sys\nprint('llamafactory_ascend.plugins' in sys.modules)\n"
    result = run(light, script=script, **switch)
    assert (result.code, result.out, result.lines) == (0, "launched\nFalse\n", [])
    assert "LLAMAFACTORY_ASCEND" not in os.environ
