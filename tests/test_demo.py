"""The demo: both runs, the table, and the CPU where the simulated NPU cannot be had."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installed import ROOT

OUT = ROOT / "demo" / "out"


def demo(**changes: str) -> str:
    """Run the demo as `make demo` does and return what it prints, without the simulated NPU on our path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changes
    done = subprocess.run(
        [sys.executable, "-m", "demo"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=360
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def simulated(name: str) -> dict[str, int]:
    """Peak bytes and operator launches that the simulated NPU counted in one of the runs."""
    records = [json.loads(line) for line in (OUT / f"{name}.simulator.jsonl").read_text().splitlines()]
    peak = max(stats["requested_bytes.all.peak"] for r in records for stats in r["stats"].values())
    return {"peak": peak, "launches": sum(int(count) for r in records for count in r["ops"].values())}


def losses(name: str) -> list[float]:
    state = json.loads((OUT / name / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def test_demo_compares_two_runs_on_the_simulated_npu() -> None:
    printed = demo()
    assert "simulated NPU. No figure below is one of real hardware." in printed
    assert (
        "step 12 of 12" in printed
        and "LLAMAFACTORY_ASCEND=0 llamafactory-cli train demo/recipe.yaml" in printed
    )
    assert len(re.findall(r"loss, step \d+ .* (?:same|within 0\.2%) ", printed)) == 12
    assert losses("plugin") == pytest.approx(losses("stock"), rel=2e-3) and len(losses("stock")) == 12

    stock, ours = simulated("stock"), simulated("plugin")
    assert ours["peak"] < 0.5 * stock["peak"] and ours["launches"] < 0.35 * stock["launches"]
    for counted in (stock, ours):
        assert f"{counted['peak'] / 2**20:.1f} MiB" in printed and f"{counted['launches']:,}" in printed

    report = ROOT / re.search(r"report: (\S+)", printed)[1]  # type: ignore[index]
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["state"] == "completed"
    assert found["ranks"][0]["kernels"]["attested"]["gated_delta_rule"]["called"] == 6
    assert not (OUT / "stock" / "ascend_report.json").exists()


def test_demo_runs_on_the_cpu_and_says_why() -> None:
    printed = demo(CXX="no-such-compiler")
    assert "Training on the CPU: no C++ compiler: no-such-compiler is not on PATH" in printed
    assert len(re.findall(r"loss, step \d+ .* same ", printed)) == 12
    assert "need the simulated NPU" in printed and "MiB" not in printed


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_sets_up_and_runs(target: str, tmp_path: Path) -> None:
    """On a machine without an environment: what make would do, in order; no package host is named."""
    command = ["make", "--dry-run", target, f"VENV={tmp_path / 'new'}"]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    steps = [
        "python3 -m venv",
        "torch==2.10.0 torchvision==0.25.0 torchaudio==2.10.0",
        "--editable '.[test]'",
    ]
    steps += ["-m demo"] if target == "demo" else ["ruff format --check", "ruff check", "mypy", "pytest -n 2"]
    positions = [plan.index(step) for step in steps]
    assert positions == sorted(positions)
    assert "llamafactory==0.9.5" in plan and "://" not in plan and "index-url" not in plan
