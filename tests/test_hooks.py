"""Every hook: documented with its arguments, and called for a third party's plugin in a stock run."""

import inspect
import json
from pathlib import Path

import pytest

from llamafactory_ascend import hookspecs
from tests.fake_host import run, write, write_plugin
from tests.running import Result, Train

DOCS = Path(__file__).parent.parent / "docs" / "hooks.md"
HOOKS = {name: function for name, function in vars(hookspecs).items() if name.startswith("ascend_")}

# Uses every hook; what it saw comes back in its section of the report.
PLUGIN = """
import os
from llamafactory_ascend import hookimpl
from llamafactory_ascend.patching import Patch, Target
from llamafactory_ascend.run import Finding

seen = {}

def count(original, *args, **kwargs):
    seen["patched_calls"] = seen.get("patched_calls", 0) + 1
    return original(*args, **kwargs)

@hookimpl
def ascend_patches():
    target = Target("llamafactory.model.patcher", "patch_config")
    return [Patch("witness.config", (target,), count, ("...",), why="A test.", remove_when="never")]

@hookimpl
def ascend_environment(command):
    return {"WITNESS": command, "WITNESS_TAKEN": "default"}

@hookimpl
def ascend_arguments(run, arguments):
    arguments.training.max_steps = run.settings.plugins["witness"]["steps"]

@hookimpl
def ascend_preflight(run, arguments):
    return [Finding("note", "witness", f"{arguments.training.max_steps} steps")]

@hookimpl
def ascend_dataset_info():
    from pathlib import Path
    return [Path(__file__).parent / "witness_data" / "dataset_info.json"]

@hookimpl
def ascend_kernels():
    from llamafactory_ascend.kernels.backends import Backend
    return [Backend("witness", "gated_delta_rule", "witness_plugin:count")]

@hookimpl
def ascend_before_model(run, arguments):
    seen["before_model"] = arguments.model.model_name_or_path

@hookimpl
def ascend_after_model(run, model):
    seen["after_model"] = [type(model).__name__, sum(p.requires_grad for p in model.parameters())]

@hookimpl
def ascend_trainer_callbacks(run, trainer):
    from transformers import TrainerCallback
    class Counting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen["steps"] = state.global_step
        def on_log(self, args, state, control, **kwargs):
            seen["logs"] = seen.get("logs", 0) + 1
            raise RuntimeError("a broken event")
    seen["trainer"] = type(trainer).__name__
    return [Counting]

@hookimpl
def ascend_saved(run, trainer):
    seen["saved"] = "adapter_model.safetensors" in os.listdir(trainer.args.output_dir)

@hookimpl
def ascend_report_sections(run):
    environment = {name: os.environ[name] for name in ("WITNESS", "WITNESS_TAKEN")}
    return {"witness": {**seen, "environment": environment}}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_plugin(tmp_path_factory.mktemp("plugin"), "witness", PLUGIN)
    rows = json.dumps([{"instruction": "a question", "input": "", "output": "an answer"}] * 8)
    info = json.dumps({"witness_set": {"file_name": "rows/witness.json"}})
    return write(folder, {"witness_data/dataset_info.json": info, "witness_data/rows/witness.json": rows})


@pytest.fixture(scope="module")
def result(train_once: Train, installed: Path) -> Result:
    """Two steps on a CPU with a plugin that uses every hook, the trace on."""
    env = {"PYTHONPATH": str(installed), "LLAMAFACTORY_ASCEND_TRACE": "1", "WITNESS_TAKEN": "mine"}
    block = {"plugins": {"witness": {"steps": 2}}}
    found = train_once(npu=False, env=env, dataset="tiny,witness_set", ascend=block)
    assert found.code == 0, found.text
    return found


@pytest.fixture(scope="module")
def section(result: Result) -> dict[str, object]:
    found: dict[str, object] = result.report["ranks"][0]["witness"]
    return found


def test_every_hook_is_documented_and_tested() -> None:
    """A heading with the exact arguments, a sentence in the code, and a test of its name in this file."""
    text = DOCS.read_text(encoding="utf-8")
    documented = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ascend_")]
    assert documented == [
        f"{name}({', '.join(inspect.signature(hook).parameters)})" for name, hook in HOOKS.items()
    ]
    assert all(hook.__doc__ and hook.__doc__.strip().endswith(".") for hook in HOOKS.values())
    assert {f"test_{name}" for name in HOOKS} <= set(globals())


def test_ascend_patches(result: Result, section: dict[str, object]) -> None:
    patch = next(patch for patch in result.report["patches"] if patch["id"] == "witness.config")
    assert (patch["state"], patch["hits"], section["patched_calls"]) == ("hit", 1, 1)


def test_ascend_environment(result: Result, section: dict[str, object]) -> None:
    """A default is set, a value that is there stays, and the report says which was which."""
    assert section["environment"] == {"WITNESS": "train", "WITNESS_TAKEN": "mine"}
    decisions = result.report["decisions"]
    assert decisions["environment.WITNESS"]["reason"] == "default of the plugin"
    assert (
        decisions["environment.WITNESS_TAKEN"]["reason"] == "set in the environment; the default is default"
    )


def test_ascend_arguments(result: Result) -> None:
    """The recipe says four steps, the plugin's setting two."""
    assert len(result.losses) == 2


def test_ascend_preflight(result: Result) -> None:
    assert {"level": "note", "subject": "witness", "message": "2 steps"} in result.report["findings"]


def test_ascend_dataset_info(result: Result, installed: Path) -> None:
    """A recipe names a plugin's data set like the user's own; its rows are trained on."""
    assert "Num examples = 72" in result.text  # 64 of tiny, 8 of the witness
    decision = result.report["decisions"]["data.witness_set"]
    assert decision["choice"] == str(installed / "witness_data" / "rows" / "witness.json")
    assert decision["reason"] == f"a fragment: {installed / 'witness_data' / 'dataset_info.json'}:1"


def test_ascend_kernels(installed: Path) -> None:
    """Its back end stands beside the built-in ones; the operator's tests show what is done with them."""
    script = (
        "from llamafactory_ascend import plugins\n"
        "found = [b for backends in plugins.manager().hook.ascend_kernels() for b in backends]\n"
        "print([b.target for b in found if b.name == 'witness'], len(found) > 1)"
    )
    assert run(installed, script=script).out == "['witness_plugin:count'] True\n"


def test_ascend_before_model(section: dict[str, object]) -> None:
    assert str(section["before_model"]).endswith("qwen3_5")


def test_ascend_after_model(section: dict[str, object]) -> None:
    """The adapters are on: LoRA on q, k, v and o of one attention layer of the tiny hybrid has 8 tensors."""
    kind, trainable = section["after_model"]  # type: ignore[misc]
    assert (kind, trainable % 8, trainable > 0) == ("PeftModelForCausalLM", 0, True)


def test_ascend_trainer_callbacks(result: Result, section: dict[str, object]) -> None:
    """A class is accepted as by the Trainer; an event that raises is called once and named once."""
    assert (section["trainer"], section["steps"]) == ("CustomSeq2SeqTrainer", 2)
    assert section["logs"] == 1
    messages = [finding["message"] for finding in result.report["findings"] if "on_log" in finding["message"]]
    assert len(messages) == 1
    assert messages[0].startswith(
        "plugin `witness`: Counting.on_log failed: RuntimeError: a broken event at "
    )
    assert "witness_plugin.py:" in messages[0]
    assert result.text.count("a broken event") >= 1


def test_ascend_saved(section: dict[str, object]) -> None:
    assert section["saved"] is True


def test_ascend_report_sections(result: Result) -> None:
    assert json.dumps(result.report["ranks"][0]["witness"])


def test_trace(result: Result) -> None:
    """One line per call: which hook, which plugins, what came of it."""
    lines = [line for line in result.text.splitlines() if "ascend_preflight ->" in line]
    assert len(lines) == 1
    assert lines[0].startswith("[llamafactory-ascend] rank 0: ascend_preflight -> ")
    assert "witness" in lines[0] and "results, " in lines[0] and lines[0].endswith(" ms")
    assert [hook for hook in HOOKS if f" {hook} -> " not in result.text] == []
