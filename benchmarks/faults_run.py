"""One fault is injected into one run of the stock command, and judged: survived, lost, or hung."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from llamafactory_ascend.checks.adapter import check

TESTS = Path(__file__).resolve().parent.parent / "tests"
BIN = Path(sys.executable).parent
MARK = "FAULTS_MARK"  # by which every process of a run is known, whoever its parent is by now
ALL = (1, 2, 3, 4, 5)  # steps with a checkpoint where a run completes
DONE = "llamafactory-ascend: completed"
STOPPED = '"state": "stopped"'
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NPROC_PER_NODE")


class NotInjected(Exception):
    """This machine does not let the fault be made; the message says why."""


@dataclass
class Scene:
    """What a run will be started with; ``Fault.prepare`` changes it.

    Attributes:
        folder: of the run alone.
        recipe, env: recipe and environment, with those of the fault in them.
        command: the words before the recipe.
        path: where the recipe is written.
        undo: what to do when the run has been judged.
    """

    folder: Path
    recipe: dict[str, Any]
    env: dict[str, str]
    command: list[str]
    path: Path
    undo: contextlib.ExitStack

    @property
    def output(self) -> Path:
        return Path(self.recipe["output_dir"])


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name, how: what is broken, and how it is.
        says: what the output or ascend_report.json must hold, each of them.
        codes: exit codes, one of which must be the command's; 0 where the fault must not matter.
        ranks: processes that train.
        npu: on the simulated NPU; more than one rank always is.
        sabotage: what ``faults_saboteur.py`` does in step 4, on ``rank`` alone if that is given.
        recipe, env: changes to the recipe (None takes a key out) and to the environment.
        shell: how bash runs the command ``"$@"``.
        prepare: makes the fault before the start.
        whole: steps whose checkpoints must be whole afterwards.
        kept: checkpoints that were there before the start must be the same to the byte afterwards.
        wait: seconds after which the command hangs.
        after: seconds that its processes may go on once it has ended.
    """

    name: str
    how: str
    says: tuple[str, ...]
    codes: tuple[int, ...] = (1,)
    ranks: int = 1
    npu: bool = False
    sabotage: str = ""
    rank: int | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    shell: str = ""
    prepare: Callable[[Scene], None] | None = None
    whole: tuple[int, ...] = (1, 2)
    kept: bool = True
    wait: float = 120
    after: float = 10


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        problems: why it is not survived; for ``not injected`` the reason.
        code: the command's exit code, None where it did not end.
    """

    fault: Fault
    state: Literal["survived", "lost", "hung", "not injected"]
    problems: tuple[str, ...]
    code: int | None
    seconds: float


def recipe(assets: Path, output: Path) -> dict[str, Any]:
    """A LoRA run of five steps on the tiny Qwen3, a checkpoint after each."""
    return {
        "model_name_or_path": str(assets / "qwen3"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 4,
        "lora_target": "q_proj,v_proj",
        "dataset": "tiny",
        "dataset_dir": str(assets / "data"),
        "template": "qwen3_nothink",
        "cutoff_len": 128,
        "max_samples": 24,
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "max_steps": 5,
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1.0e-3,
        "report_to": "none",
    }


def environment(work: Path, ranks: int, npu: bool) -> dict[str, str]:
    """The environment of a run, with nothing of this process's own run in it."""
    env = {name: value for name, value in os.environ.items() if name not in DISTRIBUTED}
    env = {name: value for name, value in env.items() if not name.startswith("LLAMAFACTORY_ASCEND")}
    paths = [str(work / "saboteur"), *([str(TESTS / "sim_npu")] if npu else [])]
    env |= {
        "HF_HOME": str(work / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "SIM_NPU_DEVICES": str(ranks),
    }
    if ranks > 1:
        env |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(ranks)}
    return env


def install_saboteur(folder: Path) -> None:
    """Make ``faults_saboteur.py`` a plugin that a run finds in ``folder``."""
    info = folder / "saboteur-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saboteur\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[llamafactory_ascend]\nsaboteur = saboteur\n")
    shutil.copy(Path(__file__).with_name("faults_saboteur.py"), folder / "saboteur.py")


def make_seed(work: Path) -> None:
    """Train two steps without a fault: the checkpoints that every run starts from.

    Raises:
        SystemExit: that fails already.
    """
    install_saboteur(work / "saboteur")
    if (work / "seed" / "checkpoint-2").is_dir():
        return
    path = work / "seed.yaml"
    path.write_text(yaml.safe_dump({**recipe(work / "assets", work / "seed"), "max_steps": 2}))
    command = [str(BIN / "llamafactory-cli"), "train", str(path)]
    done = subprocess.run(command, env=environment(work, 1, npu=False), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llamafactory-cli ended with {done.returncode}:\n{done.stderr[-4000:]}")


def run(fault: Fault, work: Path, patience: float = 1) -> Outcome:
    """Run the command with the fault in it.

    Args:
        work: holds ``assets``, ``seed`` and ``saboteur``; the run gets a folder of its own there.
        patience: by which all waits are multiplied, for a machine that is busy.
    """
    folder = work / "runs" / fault.name.replace(" ", "_").replace("/", "_")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begun = time.monotonic()
    with contextlib.ExitStack() as undo:
        scene = set_scene(fault, work, folder, undo)
        try:
            if fault.prepare is not None:
                fault.prepare(scene)
        except NotInjected as reason:
            return Outcome(fault, "not injected", (str(reason),), None, 0)
        saved = checkpoints(scene.output)
        code, hung = execute(fault, scene, patience)
        seconds = time.monotonic() - begun
        if hung:
            return Outcome(fault, "hung", (hung,), code, seconds)
        problems = tuple(judge(fault, scene, code, saved))
        return Outcome(fault, "lost" if problems else "survived", problems, code, seconds)


def set_scene(fault: Fault, work: Path, folder: Path, undo: contextlib.ExitStack) -> Scene:
    """Return the run as it would be without the fault, but for the fault's recipe and variables."""
    if not (work / "runs").samefile(folder.parent):
        raise ValueError(f"{folder} is outside {work}")
    npu = fault.npu or fault.ranks > 1
    found = {**recipe(work / "assets", folder / "output"), **fault.recipe}
    found["model_name_or_path"] = str(work / "assets" / found["model_name_or_path"])  # or the path that it is
    env = environment(work, fault.ranks, npu) | {MARK: str(folder), **fault.env}
    if fault.sabotage:
        env["SABOTAGE"] = fault.sabotage
    if fault.rank is not None:
        env["SABOTAGE_RANK"] = str(fault.rank)
    command = [str(BIN / "llamafactory-cli"), "train"]
    scene = Scene(folder, found, env, command, folder / "recipe.yaml", undo)
    plant(work / "seed", scene.output)
    return scene


def plant(seed: Path, output: Path) -> None:
    """Copy the checkpoints of ``seed`` into an output_dir."""
    for checkpoint in seed.glob("checkpoint-*"):
        shutil.copytree(checkpoint, output / checkpoint.name)


def execute(fault: Fault, scene: Scene, patience: float) -> tuple[int | None, str]:
    """Run it, with its output in the folder's ``log``; return the exit code and what hangs, "" if nothing."""
    if not scene.path.exists():
        told = {key: value for key, value in scene.recipe.items() if value is not None}
        scene.path.write_text(yaml.safe_dump(told, allow_unicode=True), encoding="utf-8")
    words = [*scene.command, str(scene.path)]
    if fault.shell:
        words = ["bash", "-c", fault.shell, "bash", *words]
    with (scene.folder / "log").open("wb") as log:
        process = subprocess.Popen(
            words, env=scene.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=scene.folder
        )
        try:
            code: int | None = process.wait(fault.wait * patience)
            deadline = time.monotonic() + fault.after * patience
            while (left := marked(str(scene.folder))) and time.monotonic() < deadline:
                time.sleep(0.2)
            hung = f"{len(left)} processes go on after the command has ended" if left else ""
        except subprocess.TimeoutExpired:
            code, hung = None, f"has not ended after {fault.wait * patience:.0f} s"
        finally:
            for pid in marked(str(scene.folder)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    return code, hung


def marked(mark: str) -> list[int]:
    """Return the processes of a run: those whose environment holds its mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def checkpoints(output: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in the checkpoints of an output_dir."""
    files = output.glob("checkpoint-*/**/*") if output.is_dir() else ()
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


def judge(fault: Fault, scene: Scene, code: int | None, saved: Mapping[str, str]) -> Iterator[str]:
    """Yield what was lost: the exit code, the message, a checkpoint."""
    if code not in fault.codes:
        yield f"exit code {code} instead of {' or '.join(map(str, fault.codes))}"
    text = said(scene)
    for fragment in fault.says:
        if fragment not in text:
            yield f"nothing says `{fragment}`"
    if fault.kept:
        now = checkpoints(scene.output)
        changed = sorted(path for path, digest in saved.items() if now.get(path) != digest)
        if changed:
            yield f"{len(changed)} saved files changed or gone, first {Path(changed[0]).name}"
    for step in fault.whole:
        folder = scene.output / f"checkpoint-{step}"
        problems = check(folder).problems if folder.is_dir() else ("not there",)
        if problems:
            yield f"checkpoint-{step}: {problems[0]}"


def said(scene: Scene) -> str:
    """Return the run's output and the strings of its report, blanks and ends of lines as single blanks."""
    texts = [(scene.folder / "log").read_text(encoding="utf-8", errors="replace")]
    with contextlib.suppress(OSError, ValueError):
        report = json.loads((scene.output / "ascend_report.json").read_text(encoding="utf-8"))
        texts.append(json.dumps(report, ensure_ascii=False))
    return " ".join("\n".join(texts).split())
