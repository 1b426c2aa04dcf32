"""Before the launcher starts anything: settings are checked, the environment is filled."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamafactory_ascend import log, run
from llamafactory_ascend.checks import finished_run
from llamafactory_ascend.features import environment
from llamafactory_ascend.host import launching
from llamafactory_ascend.launching import lock, processes, torchrun
from llamafactory_ascend.report import files
from tests.fake_host import write_plugin
from tests.host.test_platform import WITNESS
from tests.running import BIN, Result, Train
from tests.running import environment as environment_of


def test_mistake_stops_before_torchrun(train: Train) -> None:
    """Two ranks were asked for: the parent says it once and leaves with 2, torchrun never starts."""
    result = train(ranks=2, ascend={"kernles": "auto"})
    assert result.code == 2
    assert result.text.count("unknown key `ascend.kernles`: did you mean `kernels`?") == 1
    assert "distributed tasks" not in result.text
    assert "Traceback" not in result.text
    assert not result.output.exists()


@pytest.mark.parametrize("words", [["none.yaml"], ["broken.yaml"], ["broken.json", "a=1"]])
def test_unreadable_recipe_is_left_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("a: [1\n")
    Path("broken.json").write_text("{")
    assert launching.check(words) == []


def test_check_returns_what_the_host_will_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("output_dir: a\n")
    assert launching.check(["x.yaml", "output_dir=b", "--ascend.strict", "true"]) == {
        "output_dir": "b",
        "ascend": {"strict": True},
    }
    assert launching.check(["--output_dir", "c"]) == ["--output_dir", "c"]


def test_environment_is_filled_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", "train", "--output_dir", "o"])
    monkeypatch.delenv("PYTORCH_NPU_ALLOC_CONF", raising=False)
    run.current.cache_clear()
    assert launching.launch(lambda: os.environ.get("PYTORCH_NPU_ALLOC_CONF")) == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:64")
    assert launching.launch(lambda: os.environ["PYTORCH_NPU_ALLOC_CONF"]) == "max_split_size_mb:64"
    decision = run.current().decisions["environment.PYTORCH_NPU_ALLOC_CONF"]
    assert (decision.choice, decision.reason) == (
        "max_split_size_mb:64",
        "set in the environment; the default is expandable_segments:True",
    )


def test_variables_of_torchrun_that_are_left_over_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stock waits for the other rank without a word. A RANK alone is read by nobody."""
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", "train", "--output_dir", "o"])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launching.launch(log.rank) == 0 and "WORLD_SIZE" not in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launching.launch(log.rank) == 1
    said = capsys.readouterr().err
    assert "rank 1: WORLD_SIZE is 2 in the environment" in said and "unset RANK LOCAL_RANK WORLD_SIZE" in said


def test_other_commands_pass_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", "version", "--ascend.nonsense"])
    monkeypatch.delenv("PYTORCH_NPU_ALLOC_CONF", raising=False)
    assert launching.launch(lambda: sys.argv[1:]) == ["version", "--ascend.nonsense"]
    assert "PYTORCH_NPU_ALLOC_CONF" not in os.environ


def test_allocator_default_needs_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.ascend_environment("train")["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("sim_npu")])
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert environment.ascend_environment("train") == {}


def test_an_output_dir_that_cannot_be_written_ends_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        sys, "argv", ["llamafactory-cli", "train", "--output_dir", str(tmp_path / "file/out")]
    )
    with pytest.raises(SystemExit) as error:
        launching.launch(lambda: pytest.fail("launched"))
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert f"output_dir {tmp_path}/file/out cannot be written: ENOTDIR (errno 20" in said


WORDS = ["my recipe.yaml", "output_dir=/a b/c", "run_name=one two"]


@pytest.fixture
def host_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[str]]:
    """``host_command(ours)``: what the host's launcher starts for WORDS on two cards, with or without us."""
    from llamafactory import launcher

    function = getattr(launcher.launch, "__wrapped__", launcher.launch)

    def command(ours: bool) -> list[str]:
        found: list[list[str]] = []

        def run(words: list[str], *_: Any, **__: Any) -> Any:
            found.append(list(words))
            return subprocess.CompletedProcess(words, 0)

        def ours_run(words: list[str], *_: Any) -> int:
            found.append(list(words))
            return 0

        monkeypatch.setattr(sys, "argv", ["llamafactory-cli", "train", *WORDS])
        monkeypatch.setenv("FORCE_TORCHRUN", "1")
        monkeypatch.setenv("NPROC_PER_NODE", "2")
        monkeypatch.setenv("MASTER_PORT", "29999")
        if ours:
            monkeypatch.setattr(torchrun, "run", ours_run)
            with launching.torchrun_beside_python(launcher), pytest.raises(SystemExit):
                function()
        else:
            monkeypatch.setattr(subprocess, "run", run)
            with pytest.raises(SystemExit):
                function()
        monkeypatch.undo()
        return found[0]

    return command


def test_words_with_blanks_reach_the_ranks_whole(host_command: Callable[[bool], list[str]]) -> None:
    stock, ours = host_command(False), host_command(True)
    assert stock[0] == "torchrun" and "my recipe.yaml" not in stock  # any on PATH, and half a path
    assert ours[:4] == [sys.executable, "-P", "-m", "torch.distributed.run"]
    assert ours[-3:] == WORDS and ours[-4] == stock[-7]
    assert ours[4:-4] == stock[1:-7] and "--nproc_per_node" in ours


def test_what_is_not_the_hosts_torchrun_is_run_as_it_is() -> None:
    assert torchrun.words(["torchrun", "--x", "1", "a.py", "b"], "a.py", ["b"]) == [
        sys.executable, *torchrun.MODULE, "--x", "1", "a.py", "b",
    ]  # fmt: skip
    assert torchrun.words(["deepspeed", "a.py", "b"], "a.py", ["b"]) is None
    assert torchrun.words(["torchrun", "a.py", "c"], "a.py", ["b"]) is None
    seen = launching.Subprocess("a.py")
    assert seen.run(["true"], check=True).returncode == 0 and seen.PIPE is subprocess.PIPE


def test_stock_does_not_find_torchrun_beside_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamafactory import launcher

    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", "train", "x.yaml"])
    monkeypatch.setenv("FORCE_TORCHRUN", "1")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(FileNotFoundError, match="'torchrun'"):
        getattr(launcher.launch, "__wrapped__", launcher.launch)()


class Started:
    """A run that goes on until it is told to stop."""

    def __init__(self, folder: Path, recipe: dict[str, Any], ranks: int, command: list[str]) -> None:
        self.output = Path(recipe["output_dir"])
        self.output.mkdir()
        killed = replace(lock.this_process("killed", "2026-01-02T03:04:05+00:00"), pid=os.getppid(), born=1)
        (self.output / lock.NAME).write_text(json.dumps(asdict(killed)))  # as an earlier run has left it
        self.path = folder / f"{self.output.name} long.yaml"
        self.path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        self.ranks, self.log = ranks, folder / f"{self.output.name}.log"
        self.process = self.start(command)

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*command, str(self.path)],
                env={**environment_of(self.ranks), "PATH": "/usr/bin:/bin"},
                stdout=log,
                stderr=log,
            )

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 200
        while files.read(self.output / files.NAME).get("last_step", 0) < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Return the processes of the run that live, by its recipe's name."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and processes.born(int(entry.name)) is not None:
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if str(self.path).encode() in words:
                    found.append(int(entry.name))
        return found


@pytest.fixture
def start(train: Train, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    if train.simulator_missing:
        pytest.skip(train.simulator_missing)
    started: list[Started] = []

    def begin(command: list[str]) -> Started:
        started.append(Started(tmp_path, train.recipe(max_steps=5000), 2, command))
        return started[-1]

    yield begin
    for run_ in started:
        for pid in run_.pids():
            processes.send(pid, signal.SIGKILL)


def judged(folder: Path) -> finished_run.RunCheck:
    """Return what `llamafactory-ascend check run` says of a folder."""
    return finished_run.check(folder, lock.this_process("", ""), time.time())


def test_sigterm_to_the_launcher_stops_all_ranks_with_a_checkpoint(start: Callable[..., Started]) -> None:
    """Stock's launcher dies alone, and torchrun trains on without it.

    llamafactory-cli by its path, torchrun not on PATH, a blank in the recipe's, a stale lock in output_dir.
    """
    long = start([str(BIN / "llamafactory-cli"), "train"])
    long.wait_for_step(2)
    said = subprocess.run(
        [str(BIN / "llamafactory-cli"), "train", str(long.path)],
        env=environment_of(2),
        capture_output=True,
        text=True,
    )
    owner = json.loads((long.output / lock.NAME).read_text())
    assert said.returncode == 2 and "Initializing" not in said.stdout
    assert owner["pid"] == long.process.pid
    assert f"host {owner['host']}, pid {owner['pid']}, started {owner['started']}" in said.stderr
    stale = f"pid {os.getppid()}, started 2026-01-02T03:04:05+00:00, was killed and left its lock behind"
    assert long.log.read_text().count(stale) == 1
    long.process.send_signal(signal.SIGTERM)
    assert long.process.wait(100) == 143
    assert long.pids() == []
    (checkpoint,) = long.output.glob("checkpoint-*")
    step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    report = files.read(long.output / files.NAME)
    assert (report["state"], report["last_step"], report["ended_ranks"]) == ("stopped", step, [0, 1])
    assert (report["launcher"]["exit_code"], report["launcher"]["unfinished_ranks"]) == (1, [])
    assert report["explanation"] == (
        f"SIGTERM: stopped after step {step}; {checkpoint} is saved, and the same command resumes from it"
    )
    assert "llamafactory-ascend: stopped" in long.log.read_text()
    verdict = judged(long.output)
    assert verdict.problems == [f"stopped: {report['explanation']}"] and verdict.warnings == []
    assert (verdict.step, verdict.max_steps, verdict.checkpoint) == (step, 5000, str(checkpoint))
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (long.output / "adapter_model.safetensors").exists()  # no product of a run that is not done
    assert not (long.output / lock.NAME).exists()


def test_plain_torchrun_has_the_lock_and_stops_when_one_rank_is_told(start: Callable[..., Started]) -> None:
    from llamafactory import launcher

    assert launcher.__file__ is not None
    options = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    words = [sys.executable, *torchrun.MODULE, *options, launcher.__file__]
    long = start(words)
    long.wait_for_step(2)
    owner = json.loads((long.output / lock.NAME).read_text())
    ranks = sorted(processes.children(long.process.pid))
    assert owner["pid"] in ranks
    os.kill(next(rank for rank in ranks if rank != owner["pid"]), signal.SIGTERM)  # rank 1
    assert long.process.wait(100) == 1 and long.pids() == []
    (checkpoint,) = long.output.glob("checkpoint-*")
    report = files.read(long.output / files.NAME)
    assert checkpoint.name == f"checkpoint-{report['last_step']}"
    assert sorted(failure["rank"] for failure in report["failures"]) == [0, 1]
    assert {failure["type"] for failure in report["failures"]} == {"Stopped"}
    assert report["state"] == "stopped"
    assert report["ended_ranks"] == [0, 1]
    assert not (long.output / lock.NAME).exists()


def test_two_nodes_share_an_output_dir(train: Train, tmp_path: Path) -> None:
    """Two launchers over loopback, a simulated device each: FSDP2, one adapter, one report.

    HCCL_CONNECT_TIMEOUT is not set, the user wants pinned memory, and there are fewer rows than ranks.
    """
    if train.simulator_missing:
        pytest.skip(train.simulator_missing)
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"]}
    evaluation = {"eval_dataset": "tiny", "do_eval": True, "max_samples": 1, "per_device_eval_batch_size": 1}
    changes = {**evaluation, "dataloader_pin_memory": True}
    recipe = train.recipe(max_steps=2, fsdp="full_shard auto_wrap", fsdp_config=config, **changes)
    path = tmp_path / "nodes.yaml"
    paths = [write_plugin(tmp_path / "site", "witness", WITNESS), os.environ["PYTHONPATH"]]
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    shared = {"FORCE_TORCHRUN": "1", "NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    nodes = [
        subprocess.Popen(
            [str(BIN / "llamafactory-cli"), "train", str(path)],
            env={**environment_of(), **shared, "NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (1, 0)
    ]
    said = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    output = Path(recipe["output_dir"])
    report = Result(0, "", output, []).report
    assert (report["state"], report["world_size"]) == ("completed", 2)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert report["ranks"][0]["sharding"]["version"] == 2 and report["ranks"][0]["adapter"]["ok"]
    assert len(report["run"].partition(".")[0].split("+")) == 2
    assert not (output / lock.NAME).exists()
    verdict = judged(output)
    assert (verdict.problems, verdict.exit_code, verdict.sha256) == (
        [],
        0,
        report["ranks"][0]["adapter"]["sha256"],
    )
    seen = [rank["witness"] for rank in report["ranks"]]
    assert [each["HCCL_CONNECT_TIMEOUT"] for each in seen] == ["1800", "1800"]
    assert [each["pin"] for each in seen] == [True, True]
    findings = {each["subject"]: (each["level"], each["message"]) for each in report["findings"]}
    level, message = findings["dataloader_pin_memory"]
    assert level == "warning" and "leave it out where a run dies after hours" in message
    level, message = findings["evaluation"]
    assert level == "note" and message.startswith("1 evaluation rows, 2 ranks")


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_ray_workers_report_and_the_driver_holds_the_lock(train: Train) -> None:
    """Ray alone, without its dashboard: `master_addr` spares the host its question for the head's address.

    Not in tmp_path: the names of its sockets may have 107 characters.
    """
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # nothing in $HOME, no network
        devices = {"SIM_NPU_DEVICES": "2", "ASCEND_RT_VISIBLE_DEVICES": "0,1", "USE_RAY": "1", **quiet}
        cluster = {"num_cpus": 20, "resources": {"NPU": 2}, "include_dashboard": False, "_temp_dir": folder}
        address = "127.0.0.2"  # 127.0.0.1 stands for the machine's own
        kwargs = {**cluster, "_node_ip_address": address, "object_store_memory": 80 << 20}
        result = train(
            env=devices, max_steps=2, ray_num_workers=2, master_addr=address, ray_init_kwargs=kwargs
        )
    assert result.code == 0, result.text
    assert (result.report["state"], result.report["world_size"]) == ("completed", 2)
    assert [rank["rank"] for rank in result.report["ranks"]] == [0, 1]
    assert not (result.output / lock.NAME).exists()
