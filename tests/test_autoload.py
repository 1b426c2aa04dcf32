"""Activation in every process that may train, with the real host; and the switches that prevent it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.fake_host import run
from tests.running import BIN, Result, Train, environment

EVERY_PATCH_OF_A_RUN = {
    "arguments.parse",
    "arguments.read",
    "arguments.train",
    "checkpointing.enable",
    "model.load",
    "trainer.init",
    "trainer.save_state",
    "training.run",
}


def hit(result: Result) -> set[str]:
    """The patches whose replacement was called in rank 0."""
    assert result.code == 0, result.text
    return {patch["id"] for patch in result.report["patches"] if patch["state"] == "hit"}


def test_command_line(train: Train) -> None:
    """`llamafactory-cli train` in one process, the launcher's function included; every source is known."""
    result = train(npu=False, max_steps=1)
    assert hit(result) >= EVERY_PATCH_OF_A_RUN | {"launcher.launch"}
    assert "not tested with" not in result.text
    assert result.text.count("[llamafactory-ascend] active: ") == 1


def test_torchrun_ranks(train: Train) -> None:
    """The ranks meet the host half imported: `train/tuner.py` imports torch in its first line."""
    # with an evaluation, whose losses accelerate gathers into a flat tensor
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": "tiny", "max_samples": 8}
    result = train(ranks=2, max_steps=1, **evaluation)
    assert "'eval_loss'" in result.text
    assert hit(result) >= EVERY_PATCH_OF_A_RUN
    assert result.text.count("[llamafactory-ascend] active: ") == 1, "rank 0 speaks for all"
    assert [rank["rank"] for rank in result.report["ranks"]] == [0, 1]
    assert (
        result.report["decisions"]["environment.PYTORCH_NPU_ALLOC_CONF"]["choice"]
        == "expandable_segments:True"
    )


def test_accelerate_launch(train: Train) -> None:
    """`accelerate launch -m llamafactory.launcher` never calls the launcher's function."""
    words = [
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    command = [str(BIN / "accelerate"), "launch", *words, "-m", "llamafactory.launcher"]
    result = train(max_steps=1, command=command)
    assert hit(result) >= EVERY_PATCH_OF_A_RUN
    assert "environment.PYTORCH_NPU_ALLOC_CONF" in result.report["decisions"]


# What a Ray worker does: a fresh process unpickles a function of `train/tuner.py`, which imports the host
# from there, and calls it with what `read_args` returned in the driver.
WORKER = """
import json, multiprocessing, pathlib, sys

def work(config):
    from llamafactory.train.tuner import _training_function
    _training_function(config)

if __name__ == "__main__":
    config = {"args": json.loads(pathlib.Path(sys.argv[1]).read_text()), "callbacks": []}
    child = multiprocessing.get_context("spawn").Process(target=work, args=(config,))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_spawned_worker(train: Train, tmp_path: Path) -> None:
    recipe = train.recipe(max_steps=1, ascend={"checkpointing": "full"})
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "args.json").write_text(json.dumps(recipe))
    process = subprocess.run(
        [sys.executable, "worker.py", "args.json"],
        env=environment(npu=False),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    result = Result(process.returncode, process.stdout + process.stderr, Path(recipe["output_dir"]), [])
    assert hit(result) >= EVERY_PATCH_OF_A_RUN - {"arguments.read"}
    assert result.report["settings"]["checkpointing"] == "full"


@pytest.mark.parametrize(
    "first", ["llamafactory.hparams.parser", "llamafactory.model.model_utils.checkpointing"]
)
def test_real_module_imported_first(first: str) -> None:
    """Somebody's program: torch is imported from inside this module, and the names it binds are ours."""
    names = {
        "llamafactory.hparams.parser": "get_train_args",
        "llamafactory.model.model_utils.checkpointing": "_gradient_checkpointing_enable",
    }
    script = (
        f"from {first} import {names[first]} as early\n"
        "import llamafactory.train.tuner as tuner, llamafactory.hparams as hparams, json\n"
        "from llamafactory_ascend.host import seams\n"
        "states = {name: str(record.state) for name, record in seams.ledger().records.items()}\n"
        "same = tuner.get_train_args is hparams.get_train_args\n"
        "print(json.dumps([hasattr(early, '__wrapped__'), same, states]))"
    )
    result = run(script=script)
    assert result.code == 0, result.err
    early, same, states = json.loads(result.out.splitlines()[-1])
    assert (early, same) == (True, True)
    assert {name for name in EVERY_PATCH_OF_A_RUN if states[name] != "applied"} == set()


def test_commands_that_do_not_train(train: Train, tmp_path: Path) -> None:
    """An export whose recipe has the block works, and no report appears."""
    recipe = {
        "model_name_or_path": str(train.assets / "qwen3_5"),
        "template": "qwen3_5_nothink",
        "export_dir": str(tmp_path / "merged"),
        "ascend": {"strict": True},
    }
    (tmp_path / "export.yaml").write_text(yaml.safe_dump(recipe))
    process = subprocess.run(
        [str(BIN / "llamafactory-cli"), "export", str(tmp_path / "export.yaml")],
        env=environment(npu=False),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "merged/config.json").exists()
    assert not list(tmp_path.rglob("ascend_report*"))
    assert "[llamafactory-ascend]" not in process.stdout + process.stderr


@pytest.mark.parametrize("switch", [{"LLAMAFACTORY_ASCEND": "off"}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}])
def test_switched_off(switch: dict[str, str]) -> None:
    """Nothing of ours is loaded, and stock refuses the block: the run would not be what was promised."""
    script = (
        "import sys, torch\nfrom llamafactory.hparams import parser\n"
        "print([name for name in sys.modules if name.startswith('llamafactory_ascend.')])\n"
        "recipe = {'model_name_or_path': 'm', 'output_dir': 'o'}\n"
        "parser._parse_train_args({**recipe, 'ascend': {'strict': True}})\n"
    )
    result = run(script=script, **switch)
    loaded = ["llamafactory_ascend._autoload"] if "LLAMAFACTORY_ASCEND" in switch else []
    assert (result.code, result.out.splitlines()[-1]) == (1, str(loaded))
    assert "ValueError: Some keys are not used by the HfArgumentParser: ['ascend']" in result.err
    assert result.lines == []


def test_version_says_what_stock_says() -> None:
    command = [str(BIN / "llamafactory-cli"), "version"]
    env = {**os.environ, "PYTHONPATH": ""}
    found = [
        subprocess.run(
            command, env={**env, "LLAMAFACTORY_ASCEND": on}, capture_output=True, text=True, timeout=120
        )
        for on in ("1", "0")
    ]
    assert found[0].returncode == found[1].returncode == 0
    assert found[0].stdout == found[1].stdout
    assert "[llamafactory-ascend]" not in found[0].stderr


@pytest.mark.parametrize(
    ("ascend", "code"),
    [(None, 0), ({"strict": True}, 1), ({"checkpointing": "full"}, 1), ({"checkpointing": "off"}, 0)],
)
def test_missing_hook_target(
    train: Train, tmp_path: Path, ascend: dict[str, object] | None, code: int
) -> None:
    """A host with another signature: stock behaviour and one line, or an error if it was asked for."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(GONE)
    result = train(npu=False, max_steps=1, env={"PYTHONPATH": str(site)}, ascend=ascend)
    assert result.code == code, result.text
    message = (
        "patch checkpointing.enable is not in place: refused: parameters are ('model',), the patch was made"
    )
    if code:
        assert f"[llamafactory-ascend] {message}" in result.text
        assert "Traceback" not in result.text
        assert "{'loss'" not in result.text
    else:
        assert result.text.count(f"[llamafactory-ascend] checkpointing: {message}") == 1
        assert len(result.losses) == 1


# Before the plugin sees the module complete, its function has got another signature, as in a later host.
GONE = """
import inspect
import wrapt

def change(module):
    stock = module._gradient_checkpointing_enable
    def later(*args, **kwargs):
        return stock(*args, **kwargs)
    later.__signature__ = inspect.signature(lambda model: None)
    module._gradient_checkpointing_enable = later

wrapt.register_post_import_hook(change, "llamafactory.model.model_utils.checkpointing")
"""
