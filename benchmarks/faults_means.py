"""What makes a fault before the start (``Fault.prepare``): changes to files, variables and packages."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.faults_run import NotInjected, Scene
from benchmarks.faults_saboteur import fill_disk
from llamafactory_ascend.launching import lock

PICTURES = {
    "model_name_or_path": "qwen25vl",
    "dataset": "tiny_mm",
    "template": "qwen2_vl",
    "max_samples": 16,
}
ROWS = [
    {
        "instruction": f"how many apples are in basket {count}?",
        "input": "",
        "output": "count them, they are many",
    }
    for count in range(24)
]
CHINESE = json.dumps([{**row, "output": "数一数,有很多"} for row in ROWS], ensure_ascii=False)
Prepare = Callable[[Scene], None]


def cut(path: Path, share: float = 0.5) -> None:
    """Cut a file off; a share of 0 leaves it empty."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def data(text: str | bytes, info: str = "", name: str = "tiny.json") -> Prepare:
    """Give the run a data set of its own."""

    def prepare(scene: Scene) -> None:
        folder = scene.folder / "data"
        folder.mkdir()
        entry = {"tiny": {"file_name": "tiny.json"}, "good": {"file_name": "good.json"}}
        (folder / "dataset_info.json").write_text(info or json.dumps(entry))
        (folder / "good.json").write_text(json.dumps(ROWS))
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        scene.recipe["dataset_dir"] = str(folder)

    return prepare


def pictures(scene: Scene) -> None:
    """Give the run pictures of its own, the first of which is missing."""
    folder = scene.folder / "data"
    shutil.copytree(scene.recipe["dataset_dir"], folder)
    if "SABOTAGE" in scene.env:
        scene.env["SABOTAGE_FOLDER"] = str(folder)
    else:
        (folder / "im0.png").unlink()
    scene.recipe["dataset_dir"] = str(folder)
    afresh(scene)  # the checkpoints are another model's


def model(change: Callable[[Path], Any]) -> Prepare:
    """Give the run a copy of the model, changed."""

    def prepare(scene: Scene) -> None:
        folder = scene.folder / "model"
        shutil.copytree(scene.recipe["model_name_or_path"], folder)
        change(folder)
        scene.recipe["model_name_or_path"] = str(folder)

    return prepare


def checkpoint(change: Callable[[Path], Any]) -> Prepare:
    """Change the checkpoint that the run resumes from."""

    def prepare(scene: Scene) -> None:
        change(scene.output / "checkpoint-2")

    return prepare


def package(name: str, code: str, version: str = "", distribution: str = "") -> Prepare:
    """Put a package in front of the installed one; with a version it has metadata."""
    known = distribution or name

    def prepare(scene: Scene) -> None:
        folder = scene.folder / "packages"
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(code)
        if version:
            info = folder / f"{known.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {known}\nVersion: {version}\n")
            (info / "top_level.txt").write_text(f"{name}\n")
            if name == "torch_npu":
                (info / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {name}:_autoload\n")
        scene.env["PYTHONPATH"] = os.pathsep.join([str(folder), scene.env["PYTHONPATH"]])

    return prepare


def written(text: str) -> Prepare:
    """Write the recipe as it is."""
    return lambda scene: scene.path.write_text(text) and None


def at(path: str) -> Prepare:
    """Move output_dir below the run's folder."""

    def prepare(scene: Scene) -> None:
        goal = scene.folder / path
        goal.parent.mkdir(parents=True, exist_ok=True)
        scene.output.rename(goal)
        scene.recipe["output_dir"] = str(goal)

    return prepare


def recipe_with_blanks(scene: Scene) -> None:
    scene.path = scene.folder / "my recipes" / "a b.yaml"
    scene.path.parent.mkdir()


def output_is_a_file(scene: Scene) -> None:
    shutil.rmtree(scene.output)
    scene.output.write_text("no folder")


def output_below_a_file(scene: Scene) -> None:
    scene.recipe["output_dir"] = str(scene.folder / "file" / "output")
    (scene.folder / "file").write_text("no folder")


def mounted(options: str, below: str = "output") -> Prepare:
    """Put a file system of its own in place of the run's folder ``below``."""

    def prepare(scene: Scene) -> None:
        goal, aside = scene.folder / below, scene.folder / "aside"
        goal.mkdir(exist_ok=True)
        shutil.copytree(goal, aside)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(goal)], capture_output=True
        )
        if done.returncode:
            raise NotInjected("a file system cannot be mounted here")
        scene.undo.callback(subprocess.run, ["umount", "--lazy", str(goal)], check=True)
        shutil.copytree(aside, goal, dirs_exist_ok=True)
        if options:
            subprocess.run(["mount", "-o", f"remount,{options}", str(goal)], check=True)

    return prepare


def full_temporary_folder(scene: Scene) -> None:
    mounted("", "tmp")(scene)
    fill_disk(scene.folder / "tmp")
    scene.env["TMPDIR"] = str(scene.folder / "tmp")


def read_only_home(scene: Scene) -> None:
    mounted("ro", "home")(scene)
    scene.env |= {"HOME": str(scene.folder / "home"), "XDG_CACHE_HOME": str(scene.folder / "home")}


def read_only_cache(scene: Scene) -> None:
    mounted("ro", "home")(scene)
    scene.env["HF_HOME"] = str(scene.folder / "home")


def held_by_another(scene: Scene) -> None:
    """Let this process hold output_dir, as another run would."""
    taken = lock.take(scene.output, lock.this_process("another", datetime.now(UTC).isoformat()))
    scene.undo.callback(taken.release)


def left_by_a_killed_run(scene: Scene) -> None:
    """Leave the lock of a process that is gone."""
    with subprocess.Popen(["sleep", "0"]) as gone:
        here = lock.this_process("gone", datetime.now(UTC).isoformat())
    owner = {**here.__dict__, "pid": gone.pid, "born": 1}
    (scene.output / lock.NAME).write_text(json.dumps(owner))


def port_in_use(scene: Scene) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    scene.undo.callback(taken.close)
    scene.env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}


def report_is_a_folder(scene: Scene) -> None:
    (scene.output / "ascend_report.json").mkdir()


def partly_saved(scene: Scene) -> None:
    """Leave what a kill leaves while checkpoint-3 is saved."""
    shutil.copytree(scene.output / "checkpoint-2", scene.output / "checkpoint-3")
    (scene.output / "checkpoint-3" / "trainer_state.json").unlink()


def afresh(scene: Scene) -> None:
    """Let the run start without a checkpoint."""
    shutil.rmtree(scene.output)


def broken_fla(scene: Scene) -> None:
    """Put a broken fla in front of a run that starts afresh: its model has linear attention."""
    package("fla", "raise ImportError('fla is broken')", "0.4.0", "flash-linear-attention")(scene)
    afresh(scene)


def broken_tokenized(scene: Scene) -> None:
    folder = scene.folder / "tokenized"
    folder.mkdir()
    (folder / "dataset_dict.json").write_text("{")
    scene.recipe["tokenized_path"] = str(folder)
