"""A recipe is judged as a training would judge it, without a model and without a trace on disk."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamafactory_ascend.cli.check_recipe import judge
from tests.running import BIN, Train, environment


def check(train: Train, *words: str, ranks: int = 1, **changes: Any) -> tuple[int, dict[str, Any]]:
    path = train.folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(train.recipe(model_name_or_path="no/such/model", **changes)))
    command = [str(BIN / "llamafactory-ascend"), "check", str(path), "--json", *words]
    done = subprocess.run(command, env=environment(ranks), capture_output=True, text=True, timeout=300)
    return done.returncode, json.loads(done.stdout)


def test_sound_recipe_leaves_no_trace(train: Train) -> None:
    code, found = check(train)
    assert (code, found["findings"]) == (0, [])
    assert "non-re-entrant" in next(
        d["choice"] for d in found["decisions"] if d["subject"] == "checkpointing"
    )
    assert not Path(train.recipe()["output_dir"]).exists()


def test_fsdp_with_the_hosts_checkpointing_twice_is_refused_as_in_a_training(train: Train) -> None:
    """Parsed as one of several ranks: stock refuses FSDP outside torchrun."""
    fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["X"], "activation_checkpointing": True}
    code, found = check(train, ranks=2, fsdp="full_shard auto_wrap", fsdp_config=fsdp)
    assert code == 2
    (error,) = [f["message"] for f in found["findings"] if f["level"] == "error"]
    assert "activation_checkpointing" in error


def test_unknown_setting_is_the_message_that_the_training_prints(train: Train) -> None:
    code, found = check(train, "ascend.kernles=auto")
    assert code == 2
    assert [f["message"] for f in found["findings"]] == [
        "command line: unknown key `ascend.kernles`: did you mean `kernels`?"
    ]


@pytest.mark.parametrize(
    ("code", "stderr", "message"),
    [
        (-9, "loading\nKilled\n", "the preflight ended with code -9; last line: Killed"),
        (None, "", "the preflight did not end within 600 s; last line: it said nothing"),
    ],
)
def test_process_that_dies_is_a_refusal(code: int | None, stderr: str, message: str) -> None:
    verdict = judge([{"stage": "arguments", "state": "begun"}], code, stderr)
    assert verdict["exit_code"] == 2 and verdict["findings"][0]["message"] == message


def test_exit_code_follows_the_worst_finding() -> None:
    def verdict(level: str) -> int:
        finding = {"level": level, "subject": "x", "message": "y"}
        said = {"findings": [finding], "decisions": []}
        return int(judge([{"stage": "said", "state": "done", "value": said}], 0, "")["exit_code"])

    assert [verdict(level) for level in ("note", "warning", "error")] == [0, 1, 2]
