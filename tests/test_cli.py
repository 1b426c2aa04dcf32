"""The command line: what doctor sees in sound and in broken environments, and what the other verbs print."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamafactory_ascend.cli import app
from llamafactory_ascend.cli.diagnosis import Exit, Probe, Surroundings, judge
from tests.installed import ROOT

VERBS = (["doctor"], ["patches"], ["check", "recipe"], ["check", "adapter"], ["check", "kernels"])
SOUND = Surroundings(environment={}, wrapt=True, entry_point=True)


def doctor(path: Path | None = None, **env: str) -> tuple[int, dict[str, Any]]:
    """Run `doctor --json` on the simulated NPU, with a folder put before everything else on the path."""
    surroundings = {**os.environ, **env}
    if path is not None:
        surroundings["PYTHONPATH"] = os.pathsep.join([str(path), os.environ["PYTHONPATH"]])
    command = [str(Path(sys.executable).with_name("llamafactory-ascend")), "doctor", "--json"]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=300, cwd=path)
    return done.returncode, json.loads(done.stdout)


def package(folder: Path, name: str, body: str) -> Path:
    """Write a package that is imported in place of the installed one."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(body, encoding="utf-8")
    return folder


def messages(diagnosis: dict[str, Any], level: str) -> list[str]:
    return [f"{f['subject']}: {f['message']}" for f in diagnosis["findings"] if f["level"] == level]


def done(stage: str, value: Any) -> list[dict[str, Any]]:
    return [{"stage": stage, "state": "begun"}, {"stage": stage, "state": "done", "value": value}]


def test_doctor_on_a_sound_installation() -> None:
    code, found = doctor()
    assert (code, found["exit_code"]) == (0, 0), found["findings"]
    assert found["active"] and found["activation"] == "`import torch` ran the entry point"
    assert found["device"]["type"] == "npu" and found["device"]["simulated"]
    states = {patch["id"]: patch["state"] for patch in found["patches"]}
    assert states["checkpointing.enable"] == "verified" and "failed" not in states.values()
    sources = {patch["source"] for patch in found["patches"] if patch["state"] != "skipped"}
    assert sources == {"still needed"}  # of a host that is tested, every source is known
    assert found["versions"]["torch"].startswith("2.") and found["versions"]["llamafactory"].startswith(
        "0.9."
    )


def test_doctor_judges_the_patches_of_a_plugin_that_is_switched_off() -> None:
    code, found = doctor(LLAMAFACTORY_ASCEND="0")
    assert code == 1 and not found["active"]
    assert messages(found, "warning") == ["activation: switched off by LLAMAFACTORY_ASCEND=0"]
    assert "verified" in {patch["state"] for patch in found["patches"]}


def test_doctor_names_the_switch_of_torch() -> None:
    code, found = doctor(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert code == 1 and not found["active"]
    warnings = messages(found, "warning")
    assert any(w.startswith("activation: switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0") for w in warnings)
    assert any(w.startswith("device: training would run on cpu") for w in warnings)


def test_doctor_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    broken = package(tmp_path, "torch", "raise OSError('libascend_hal.so: cannot open shared object file')")
    code, found = doctor(broken, HCCL_IF_BASE_PORT="\udcff")
    assert {"HCCL_IF_BASE_PORT": "\udcff"}.items() <= {
        v["name"]: v["value"] for v in found["variables"]
    }.items()
    assert code == 2 and found["device"] is None and found["patches"] == []
    (error,) = messages(found, "error")
    assert error.startswith(
        "torch: import fails: OSError: libascend_hal.so: cannot open shared object file (at "
    )
    assert found["versions"]["llamafactory"]  # from the metadata


def test_doctor_survives_an_import_that_kills_the_process(tmp_path: Path) -> None:
    code, found = doctor(package(tmp_path, "torch", "import os; os.kill(os.getpid(), 11)"))
    assert code == 2
    assert messages(found, "error") == [
        "torch: looking at it ended the process with code -11; last line: it said nothing"
    ]


def test_doctor_names_a_broken_library_of_the_host(tmp_path: Path) -> None:
    code, found = doctor(
        package(tmp_path, "peft", "raise ImportError('cannot import name X from transformers')")
    )
    assert code == 2 and found["active"]
    (error,) = messages(found, "error")
    assert error.startswith("peft: import fails: ImportError: cannot import name X from transformers")


def test_doctor_names_third_party_plugins_and_the_one_that_is_broken(tmp_path: Path) -> None:
    package(tmp_path, "broken_plugin", "raise RuntimeError('made for another version')")
    hook = "@hookimpl\ndef ascend_environment(command):\n    return {}\n"
    package(tmp_path, "good_plugin", f"from llamafactory_ascend import hookimpl\n\n{hook}")
    info = tmp_path / "example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[llamafactory_ascend]\nbad = broken_plugin\ngood = good_plugin\n")
    code, found = doctor(tmp_path)
    assert code == 1 and found["plugins"] == ["good"]
    (warning,) = messages(found, "warning")
    assert "plugin `bad` is off" in warning and "made for another version" in warning


def test_missing_wrapt_is_an_error() -> None:
    around = Surroundings(environment={}, wrapt=False, entry_point=True)
    found = judge({}, around, Probe(done("torch", {"version": "2.10.0", "active": True}), 0, ""))
    assert found.exit_code is Exit.BROKEN
    assert [(f.subject, f.hint) for f in found.findings] == [("activation", "pip install wrapt")]


def test_unregistered_entry_point_is_an_error() -> None:
    around = Surroundings(environment={}, wrapt=True, entry_point=False)
    found = judge({}, around, Probe(done("torch", {"version": "2.10.0", "active": False}), 0, ""))
    assert found.exit_code is Exit.BROKEN and "not registered" in found.activation


def test_patch_that_does_not_fit_is_a_finding_and_an_unknown_source_a_note() -> None:
    patches = [
        {
            "id": "a.b",
            "state": "failed",
            "reason": "refused: parameters are ()",
            "source": "changed, untested",
        },
        {"id": "c.d", "state": "planned", "reason": "", "target": "m:f", "source": ""},
        {"id": "e.f", "state": "verified", "reason": "", "source": "still needed"},
        {"id": "g.h", "state": "skipped", "reason": "fixed in 9", "source": "fixed upstream"},
    ]
    stages = [*done("torch", {"version": "2", "active": True}), *done("patches", patches)]
    found = judge({}, SOUND, Probe(stages, 0, ""))
    assert found.exit_code is Exit.FINDINGS
    assert [(f.level, f.subject) for f in found.findings] == [
        ("warning", "patch a.b"),
        ("warning", "patch c.d"),
        ("note", "patches"),
    ]
    assert "1 of 4" in found.findings[-1].message


def test_torch_npu_without_cann_gets_the_hint_that_helps() -> None:
    error = "RuntimeError: Failed to load the backend extension: torch_npu. You can disable ..."
    failed = {"stage": "torch", "state": "failed", "error": error, "frame": ""}
    found = judge({}, SOUND, Probe([{"stage": "torch", "state": "begun"}, failed], 0, ""))
    assert found.exit_code is Exit.BROKEN and "set_env.sh" in found.findings[0].hint


def test_text_of_doctor_ends_with_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = package(tmp_path, "torch", "raise OSError('no driver')")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    monkeypatch.setenv(
        "HCCL_IF_BASE_PORT", "\udcff\x1b[31m" + "x" * 20_000
    )  # a byte that is no text, a colour
    result = CliRunner().invoke(app, ["doctor"])
    assert "\\udcff\\x1b[31mxxx" in result.stdout and "(20,006 characters)" in result.stdout
    assert result.exit_code == 2
    assert "device" in result.stdout and "unknown: torch cannot be imported" in result.stdout
    assert result.stdout.endswith("broken: see the errors above\n")


def test_nothing_heavy_is_imported_by_the_command_itself() -> None:
    heavy = "{'torch', 'transformers', 'llamafactory', 'wrapt'}"
    code = f"import sys, llamafactory_ascend.cli; print({heavy} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_shows_examples_and_exit_codes(verb: list[str]) -> None:
    result = CliRunner().invoke(app, [*verb, "--help"])
    assert result.exit_code == 0
    assert f"llamafactory-ascend {' '.join(verb)}" in result.stdout
    assert "Examples:" in result.stdout and "Exit code" in result.stdout


def test_version_and_unknown_verb() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == "llamafactory-ascend-plugin 0.1.0\n"
    assert CliRunner().invoke(app, ["docter"]).exit_code == 2


def test_page_of_patches_is_current() -> None:
    env = {**os.environ, "LLAMAFACTORY_ASCEND_PLUGINS": "none"}
    command = [str(Path(sys.executable).with_name("llamafactory-ascend")), "patches"]
    page = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert "| `checkpointing.enable` | `llamafactory.model.model_utils.checkpointing:" in page
    assert (ROOT / "docs" / "patches.md").read_text(encoding="utf-8") == page, "type: make docs"


def test_check_adapter_says_what_is_missing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", "adapter", str(tmp_path)])
    assert result.exit_code == 1
    assert f"error {tmp_path}/adapter_model.safetensors is missing: no adapter was written" in result.stdout
    verdict = json.loads(CliRunner().invoke(app, ["check", "adapter", str(tmp_path), "--json"]).stdout)
    assert not verdict["ok"] and len(verdict["problems"]) == 2
    assert CliRunner().invoke(app, ["check", "adapter", str(tmp_path / "no")]).exit_code == 2


WRONG = """
from llamafactory_ascend import hookimpl
from llamafactory_ascend.kernels.backends import Backend


@hookimpl
def ascend_kernels():
    return [Backend("careless", "swiglu", "careless:swiglu", 5)]


def swiglu(gate, up):
    return gate.sigmoid() * up  # without the gate itself
"""


def check_kernels(path: Path | None = None, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `check kernels` on a plain CPU, with a folder put on the path."""
    surroundings = {**os.environ, "PYTHONPATH": str(path or ""), **env}
    command = [str(Path(sys.executable).with_name("llamafactory-ascend")), "check", "kernels", *words]
    return subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=300)


def test_check_kernels_on_a_cpu() -> None:
    done = check_kernels()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not usable swiglu torch_npu: it runs on npu, this is cpu" in done.stdout
    assert "near-identical keys" in done.stdout and done.stdout.endswith("all right: 36 comparisons\n")


def test_check_kernels_finds_a_wrong_back_end(tmp_path: Path) -> None:
    """That of somebody else's package, beside our own, which are right."""
    (tmp_path / "careless.py").write_text(WRONG, encoding="utf-8")
    info = tmp_path / "careless-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: careless\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[llamafactory_ascend]\ncareless = careless\n")
    done = check_kernels(tmp_path, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["ok"]
    wrong = [verdict for verdict in found["verdicts"] if not verdict["passed"]]
    assert {(verdict["operator"], verdict["backend"]) for verdict in wrong} == {("swiglu", "careless")}
    assert [verdict["dtype"] for verdict in wrong] == ["float32", "float16", "bfloat16"]
    assert set(wrong[0]["errors"]) == {"output", "d_gate", "d_up"}


def test_check_kernels_without_torch(tmp_path: Path) -> None:
    done = check_kernels(package(tmp_path, "torch", "raise OSError('no driver')"))
    assert done.returncode == 2
    assert done.stderr == (
        "error torch cannot be imported: OSError: no driver\ntype: llamafactory-ascend doctor\n"
    )
