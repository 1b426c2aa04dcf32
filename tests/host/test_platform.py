"""Before the ranks start, and in each of them before the device is opened: the stock command."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llamafactory_ascend import run
from llamafactory_ascend.checks import finished_run
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.host import platform
from llamafactory_ascend.launching import lock
from llamafactory_ascend.report import lifecycle
from llamafactory_ascend.settings import Settings
from tests.fake_host import write_plugin
from tests.running import Result, Train
from tests.sim_npu.available import unavailable_reason

assert torch.__version__  # torch calls the entry point, so that the host below is patched as in a run
from llamafactory.hparams import parser  # noqa: E402

WITNESS = """
import os, threading
from llamafactory_ascend import hookimpl
NAMES = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "PYTORCH_NPU_ALLOC_CONF")
@hookimpl
def ascend_trainer_callbacks(run, trainer):
    import torch.utils.checkpoint
    torch.utils.checkpoint.CheckpointFunction = None  # a re-entrant checkpoint would break
    return []
@hookimpl
def ascend_report_sections(run):
    import torch
    training = run.arguments.training
    return {"witness": {
        **{name: os.environ.get(name) for name in NAMES},
        "device": torch.npu.current_device(),
        "timeout": training.ddp_timeout_delta.total_seconds(),
        "pin": training.dataloader_pin_memory,
    }}
"""


@pytest.fixture(scope="module")
def result(train_once: Train, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One step on two ranks; connect and a variable that does not exist are set by the user."""
    site = write_plugin(tmp_path_factory.mktemp("site"), "witness", WITNESS)
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(site)])
    env = {"PYTHONPATH": paths, "HCCL_CONNECT_TIMEOUT": "600", "HCCL_OP_TIMEOUT": "3600"}
    workers = {"dataloader_num_workers": 1, "preprocessing_num_workers": 64}
    layers = {"gradient_checkpointing": True, "use_reentrant_gc": False}
    found = train_once(ranks=2, env=env, max_steps=1, bf16=True, **workers, **layers)
    assert found.code == 0, found.text[-4000:]
    return found


def test_every_rank_has_the_environment_and_its_card(result: Result) -> None:
    seen = [rank["witness"] for rank in result.report["ranks"]]
    shared = {
        "HCCL_CONNECT_TIMEOUT": "600",
        "HCCL_EXEC_TIMEOUT": "7200",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "timeout": 7260.0,
        "pin": False,
    }
    assert seen == [{**shared, "device": 0}, {**shared, "device": 1}]


def test_decisions_say_what_and_why(result: Result) -> None:
    decisions = {name: (each["choice"], each["reason"]) for name, each in result.report["decisions"].items()}
    assert decisions["environment.HCCL_CONNECT_TIMEOUT"] == (
        "600",
        "set in the environment; the default is 1800",
    )
    assert decisions["environment.HCCL_EXEC_TIMEOUT"] == ("7200", "default of the plugin")
    assert decisions["device"][0] == "Ascend910B3, npu:0 of 2 visible, 64 GiB"
    assert decisions["device.binding"][0] == "npu:0"
    assert decisions["precision"][0] == "bf16"
    assert decisions["ddp_timeout"][0] == "7260"
    assert decisions["dataloader_pin_memory"][0] == "false"
    assert decisions["preprocessing_num_workers"][1].startswith("64 asked for")
    assert decisions["attention.text"][0] == decisions["attention.vision"][0] == "sdpa"
    assert decisions["checkpointing"][0] == "every layer in backward, non-re-entrant"


def test_no_checkpoint_is_re_entrant(result: Result) -> None:
    """Stock's are, whatever `use_reentrant_gc` says; the witness breaks those."""
    for rank in result.report["ranks"]:
        counts = rank["checkpointing"]
        assert counts["checkpointed"] == {"text": 1} and counts["problems"] == []


def test_a_variable_that_nobody_reads_is_named(result: Result) -> None:
    (finding,) = [each for each in result.report["findings"] if "HCCL_OP_TIMEOUT" in each["message"]]
    assert finding["level"] == "warning"
    assert "the wait in a collective is HCCL_EXEC_TIMEOUT (7200 s)" in finding["message"]
    assert result.text.count("[llamafactory-ascend] environment: HCCL_OP_TIMEOUT is set") == 1


def test_forked_workers_stay_off_the_device(result: Result) -> None:
    """The simulated NPU refuses a forked child that touches it, as the real one does."""
    assert result.report["decisions"]["dataloader_num_workers"]["choice"] == "1"
    assert len(result.losses) == 1


def test_grad_norm_nan_ends_the_run_with_the_last_good_checkpoint(train: Train) -> None:
    found = train(learning_rate=1.0e30, save_strategy="steps", save_steps=1, max_steps=12)
    assert found.code == 1
    assert found.report["state"] == "failed"
    assert "step 4: the gradients of 3 optimizer steps in a row are not finite" in found.report["explanation"]
    assert [path.name for path in found.output.glob("checkpoint-*")] == ["checkpoint-1"]
    assert not (found.output / "adapter_model.safetensors").exists()
    verdict = finished_run.check(found.output, lock.this_process("", ""), time.time())
    assert (verdict.state, verdict.checkpoint) == ("failed", str(found.output / "checkpoint-1"))
    said = [problem.partition(":")[0] for problem in verdict.problems]
    assert said == ["failed", "loss is 0 at 2 of 3 logged steps, first at step 2"]


def test_bf16_on_a_soc_without_it_is_refused_before_anything_is_loaded(train: Train) -> None:
    found = train(env={"SIM_NPU_NAME": "Ascend910A"}, bf16=True)
    assert found.code == 1
    assert (
        "`bf16: true`, but Ascend910A does not compute in bfloat16; write `fp16: true` instead" in found.text
    )
    assert "Traceback" not in found.text and not found.output.exists()


def test_more_ranks_than_visible_cards_is_refused_before_any_starts(train: Train) -> None:
    """Stock starts 8 ranks, and those from the second on fail with an invalid device."""
    found = train(ranks=8, env={"ASCEND_RT_VISIBLE_DEVICES": "3"})
    assert found.code == 2
    assert found.text.count("NPROC_PER_NODE asks for 8 ranks on this node, but 1 NPU is visible") == 1
    assert "distributed tasks" not in found.text and not found.output.exists()


def test_packing_of_a_hybrid_without_a_kernel_for_it_is_refused_before_loading(train: Train) -> None:
    """Stock trains, and samples leak into each other."""
    found = train(packing=True, ascend={"kernels": "off"})
    assert found.code == 1 and found.report["state"] == "refused"
    assert "would carry the state of the linear attention from one packed sample into the next" in found.text
    assert "next: set `packing: false` and `neat_packing: false`" in found.text
    assert "Loading weights" not in found.text


def test_bitsandbytes_is_refused_before_loading_unless_it_is_allowed(train: Train) -> None:
    found = train(quantization_bit=4)
    assert found.code == 1 and found.report["state"] == "refused"
    said = "`quantization_bit: 4` with bitsandbytes trains with an abnormal loss on NPUs"
    assert found.text.count(f"[llamafactory-ascend] quantization: {said}") == 1
    assert [each["level"] for each in found.report["findings"]] == ["error"]
    assert "Loading weights" not in found.text
    found = train(quantization_bit=4, ascend={"allow": ["bitsandbytes"]})
    assert [each["level"] for each in found.report["findings"]] == ["warning"]
    assert f"{said}; allowed by `ascend.allow`" in found.text
    (failure,) = found.report["failures"]  # of the host, which does not find bitsandbytes here
    assert (failure["phase"], failure["refused"]) == ("loading", False), failure["traceback"]


# ---- in this process
RECIPE = {"output_dir": "o", "do_train": True}


@pytest.fixture
def recipe(assets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the host takes for a training, and a process without a run."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli"])
    for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    run.current.cache_clear()
    data = {"dataset": "tiny", "dataset_dir": str(assets / "data"), "template": "qwen3"}
    yield {**RECIPE, **data, "model_name_or_path": str(assets / "qwen3"), "finetuning_type": "lora"}
    lifecycle.leave()  # a training that was only begun
    run.current.cache_clear()


def test_no_run_on_a_cpu_for_lack_of_an_npu(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock trains on the CPU, without a word, until somebody looks."""
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    monkeypatch.setattr(torch.npu, "device_count", lambda: 0)
    with pytest.raises(AscendError, match=r"this would train on the CPU: torch_npu 2\.10\.0 sees no device"):
        parser.get_train_args(dict(recipe))
    allowed = {**recipe, "ascend": {"device": "any"}}
    assert platform.before_parsing(allowed, Settings(device="any")) is allowed


def test_a_broken_timeout_is_refused_before_torchrun(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "60")
    with pytest.raises(AscendError, match="HCCL takes whole seconds from 120 to 7200"):
        platform.before_launch()
    with pytest.raises(AscendError, match="HCCL takes whole seconds from 120 to 7200"):
        platform.before_parsing(dict(RECIPE), Settings())
    assert platform.before_parsing({**RECIPE, "use_cpu": True}, Settings()) == {**RECIPE, "use_cpu": True}


def test_ddp_timeout_of_the_user_is_kept(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = {**RECIPE, "ddp_timeout": 180000000}
    assert platform.before_parsing(given, Settings()) == given
    assert run.current().decisions["ddp_timeout"].reason == "set in the recipe; HCCL needs 1896"
    words = ["--output_dir", "o", "--bf16"]
    assert platform.before_parsing(words, Settings()) == [*words, "--ddp_timeout", "1896"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"a": 1, "b": None}, {"a": 1}),
        (["--bf16", "--lora-rank", "8", "--x=y"], {"bf16": "true", "lora_rank": "8", "x": "y"}),
        (["--learning_rate", "-1"], {"learning_rate": "-1"}),
    ],
)
def test_what_was_written(args: Any, expected: dict[str, Any]) -> None:
    assert platform.written(args) == expected


def test_without_torch_npu_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("sim_npu")])
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "60")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("NPROC_PER_NODE", "64")
    args = {**RECIPE, "bf16": True}
    platform.before_launch()
    assert platform.before_parsing(args, Settings()) is args
    with pytest.raises(AscendError, match="there is no NPU to use: torch_npu is not installed"):
        platform.before_parsing(args, Settings(device="npu"))
