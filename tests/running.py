"""Running the stock command in a process of its own, and reading what it left."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml

BIN = Path(sys.executable).parent
STARTUP = Path(__file__).parent / "startup"  # what it does for every process is said in it


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        code: exit code.
        text: stdout and stderr.
        output: the run's output_dir.
        simulator: one record per process that used the simulated NPU (``SIM_NPU_REPORT``).
    """

    code: int
    text: str
    output: Path
    simulator: list[dict[str, Any]]

    @cached_property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "ascend_report.json").read_text(encoding="utf-8"))
        return found

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        state = json.loads((self.output / "trainer_state.json").read_text(encoding="utf-8"))
        return [entry for entry in state["log_history"] if "loss" in entry]

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.history]

    @property
    def grad_norms(self) -> list[float]:
        return [entry["grad_norm"] for entry in self.history]

    def peak(self, rank: int = 0) -> int:
        """Peak requested bytes of a rank's simulated device."""
        stats = next(record["stats"] for record in self.simulator if int(record["rank"] or 0) == rank)
        return max(device["requested_bytes.all.peak"] for device in stats.values())

    @property
    def operators(self) -> Counter[str]:
        """Operator launches of all ranks, copies and synchronisations included."""
        total: Counter[str] = Counter()
        for record in self.simulator:
            total.update({name: int(count) for name, count in record["ops"].items()})
        return total


class Train:
    """``train(ranks=1, npu=True, plugin=True, env={}, words=[], **recipe)``."""

    def __init__(self, assets: Path, folder: Path, simulator_missing: str | None) -> None:
        self.assets, self.folder, self.simulator_missing, self.count = assets, folder, simulator_missing, 0

    def recipe(self, **changes: Any) -> dict[str, Any]:
        """A four-step LoRA run on a tiny Qwen3.5 hybrid; ``model=NAME`` picks another of the tiny models."""
        model = changes.pop("model", "qwen3_5")
        base = {
            "model_name_or_path": str(self.assets / model),
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
            "lora_rank": 8,
            "lora_target": "q_proj,k_proj,v_proj,o_proj",
            "dataset": "tiny",
            "dataset_dir": str(self.assets / "data"),
            "template": "qwen3_5_nothink",
            "cutoff_len": 128,
            "output_dir": str(self.folder / f"run{self.count}"),
            "per_device_train_batch_size": 2,
            "max_steps": 4,
            "logging_steps": 1,
            "learning_rate": 1.0e-3,
            "report_to": "none",
            "save_strategy": "no",
        }
        return {key: value for key, value in {**base, **changes}.items() if value is not None}

    def __call__(
        self,
        ranks: int = 1,
        npu: bool = True,
        plugin: bool = True,
        env: dict[str, str] | None = None,
        words: tuple[str, ...] = (),
        command: list[str] | None = None,
        timeout: float = 300,
        **changes: Any,
    ) -> Result:
        if npu and self.simulator_missing:
            pytest.skip(self.simulator_missing)
        self.count += 1
        if not plugin:
            changes.pop("ascend", None)  # stock ends with an error on a key that it does not know
        recipe = self.recipe(**changes)
        path = self.folder / f"recipe{self.count}.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        records = self.folder / f"simulator{self.count}.jsonl"
        command = command or [str(BIN / "llamafactory-cli"), "train"]
        process = subprocess.run(
            [*command, str(path), *words],
            env={**environment(ranks, npu, plugin), "SIM_NPU_REPORT": str(records), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            cwd=self.folder,
        )
        lines = records.read_text().splitlines() if records.exists() else []
        return Result(
            process.returncode, process.stdout, Path(recipe["output_dir"]), [json.loads(x) for x in lines]
        )


def environment(ranks: int = 1, npu: bool = True, plugin: bool = True) -> dict[str, str]:
    """The environment of a run: on simulated NPUs or a plain CPU, with or without the plugin."""
    env = {
        **os.environ,
        "SIM_NPU_DEVICES": str(ranks),
        "SIM_NPU_TRACE": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    env["LLAMAFACTORY_ASCEND"] = "1" if plugin else "0"
    if not npu:
        env["PYTHONPATH"] = str(STARTUP)
    if ranks > 1:
        env |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(ranks)}
    return env


def torchrun(ranks: int) -> list[str]:
    """What the host's launcher starts for a ``train``, without the launcher, which imports the host too."""
    from llamafactory import launcher

    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*words, str(launcher.__file__)]
