"""A recipe is judged as a training would judge it, without a model and without a trace on disk."""

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamafactory_ascend.cli.check_recipe import judge
from llamafactory_ascend.cli.stages import read
from llamafactory_ascend.launching import lock
from tests.running import BIN, Train, environment


def check(
    train: Train, *words: str, ranks: int = 1, env: dict[str, str] | None = None, **changes: Any
) -> tuple[int, dict[str, Any]]:
    path = train.folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(train.recipe(model_name_or_path="no/such/model", **changes)))
    command = [str(BIN / "llamafactory-ascend"), "check", str(path), "--json", *words]
    around = {**environment(ranks), **(env or {})}
    done = subprocess.run(command, env=around, capture_output=True, text=True, timeout=300)
    return done.returncode, json.loads(done.stdout)


def test_sound_recipe_leaves_no_trace(train: Train) -> None:
    """Judged by all ranks, those of other nodes too, of which none is started."""
    rows = {"eval_dataset": "tiny", "do_eval": True, "max_samples": 6, "per_device_eval_batch_size": 1}
    code, found = check(train, ranks=2, env={"NNODES": "4"}, **rows)
    (few,) = [finding for finding in found["findings"] if finding["subject"] == "evaluation"]
    assert (code, few["level"]) == (1, "note")  # 1: it evaluates the rows it trains
    assert few["message"].startswith("6 evaluation rows, 8 ranks, batches of 1: ")
    decisions = {decision["subject"]: decision["choice"] for decision in found["decisions"]}
    assert "non-re-entrant" in decisions["checkpointing"] and "ddp_timeout" in decisions
    assert not Path(train.recipe()["output_dir"]).exists()


def test_fsdp_with_the_hosts_checkpointing_twice_is_refused_as_in_a_training(train: Train) -> None:
    """Parsed as one of several ranks: stock refuses FSDP outside torchrun. The port is another training's."""
    output = Path(train.recipe()["output_dir"])
    held = lock.take(output, lock.this_process("other", "2026-01-02T03:04:05+00:00"))
    listener = socket.create_server(("127.0.0.1", 0))
    env = {"MASTER_PORT": str(listener.getsockname()[1])}
    fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["X"], "activation_checkpointing": True}
    code, found = check(train, ranks=2, env=env, fsdp="full_shard auto_wrap", fsdp_config=fsdp)
    listener.close()
    assert code == 2
    in_use, error = [f["message"] for f in found["findings"] if f["level"] == "error"]
    assert "activation_checkpointing" in error
    assert f"output_dir {output} is in use by another run: host " in in_use
    assert lock.read(output) == held.owner and [path.name for path in output.iterdir()] == [lock.NAME]
    held.release()


def test_what_the_launcher_and_the_device_refuse_is_refused(train: Train) -> None:
    """Both speak before the arguments are parsed."""
    code, found = check(train, env={"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "8"})
    (error,) = found["findings"]
    assert code == 2
    assert "NPROC_PER_NODE asks for 8 ranks on this node, but 1 NPU is visible" in error["message"]
    code, found = check(train, "ascend.device=npu", "run_name=two words", env={"PYTHONPATH": ""})
    (error,) = found["findings"]
    assert code == 2 and "there is no NPU to use: torch_npu is not installed" in error["message"]
    assert not Path(train.recipe()["output_dir"]).exists()


def test_unknown_setting_is_the_message_that_the_training_prints(train: Train) -> None:
    code, found = check(train, "--ascend.kernles", "auto")
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


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (
            "[llamafactory-ascend] a warning\n[llamafactory-ascend] no recipe `x`\n  next: ls\n",
            "no recipe `x`\n  next: ls",
        ),
        ("usage: x [-h]\n" * 99 + "x: error: argument --a: no\n", "x: error: argument --a: no"),
        ("", "SystemExit: 2"),
    ],
)
def test_what_ended_the_process_is_said_with_its_next_step(stderr: str, message: str) -> None:
    stages = [{"stage": "arguments", "state": "failed", "error": "SystemExit: 2", "frame": ""}]
    assert judge(stages, 0, stderr)["findings"][0]["message"] == message


def test_stages_of_a_process_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    file = tmp_path / "stages"
    file.write_bytes(b'{"stage": "torch", "state": "begun"}\n{"stage": "to')
    assert read(file) == [{"stage": "torch", "state": "begun"}] and read(tmp_path / "none") == []


def test_exit_code_follows_the_worst_finding() -> None:
    def verdict(level: str) -> int:
        finding = {"level": level, "subject": "x", "message": "y"}
        said = {"findings": [finding], "decisions": []}
        return int(judge([{"stage": "said", "state": "done", "value": said}], 0, "")["exit_code"])

    assert [verdict(level) for level in ("note", "warning", "error")] == [0, 1, 2]
