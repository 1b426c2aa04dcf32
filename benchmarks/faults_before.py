"""Faults that are there before the start, as data: what each does to files, variables and packages."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.faults_run import Fault, NotInjected, Scene
from benchmarks.faults_saboteur import fill_disk
from llamafactory_ascend.launching import lock

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
    shutil.rmtree(scene.output)  # checkpoints of another model


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


def package(name: str, code: str, version: str = "") -> Prepare:
    """Put a package in front of the installed one; with a version it has metadata."""

    def prepare(scene: Scene) -> None:
        folder = scene.folder / "packages"
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(code)
        if version:
            info = folder / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
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


def broken_tokenized(scene: Scene) -> None:
    folder = scene.folder / "tokenized"
    folder.mkdir()
    (folder / "dataset_dict.json").write_text("{")
    scene.recipe["tokenized_path"] = str(folder)


ARGUMENTS = [
    Fault("unknown ascend key", "`ascend: {kernles: auto}`", ("did you mean `kernels`",), (2,),
          recipe={"ascend": {"kernles": "auto"}}),
    Fault("ascend is no block", "`ascend: 3`", ("`ascend` is 3",), (2,), recipe={"ascend": 3}),
    Fault("ascend wrong type", "`ascend: {strict: perhaps}`", ("`ascend.strict` is 'perhaps'",), (2,),
          recipe={"ascend": {"strict": "perhaps"}}),
    Fault("unknown host key", "`lora_rnak: 4`", ("lora_rnak",), recipe={"lora_rnak": 4}),
    Fault("wrong type", "`lora_rank: many`", ("lora_rank", "many"), recipe={"lora_rank": "many"}),
    Fault("broken YAML", "a bracket is not closed", ("recipe.yaml", "line 1"),
          prepare=written("lora_target: [q_proj\nstage: sft\n")),
    Fault("empty recipe", "a file of no bytes", ("recipe.yaml",), (1, 2), prepare=written("")),
    Fault("no recipe", "the file does not exist", ("recipe.yaml",), shell='rm "${@: -1}"; "$@"'),
    Fault("recipe with blanks", "`my recipes/a b.yaml`, two ranks", ("llamafactory-ascend: completed",), (0,), 2,
          prepare=recipe_with_blanks, whole=(1, 2, 3, 4, 5)),
    Fault("output_dir with blanks", "`my runs/output 1`", ("llamafactory-ascend: completed",), (0,),
          prepare=at("my runs/output 1"), whole=(1, 2, 3, 4, 5)),
]  # fmt: skip

OUTPUT = [
    Fault("output_dir is a file", "a file in its place", ("output", "errno 17"), prepare=output_is_a_file,
          codes=(2,), whole=(), kept=False),
    Fault("output_dir below a file", "its parent is a file", ("cannot be written: ENOTDIR",), (2,),
          prepare=output_below_a_file, whole=(), kept=False),
    Fault("output_dir read-only", "a read-only file system", ("cannot be written: EROFS",), (2,),
          prepare=mounted("ro")),
    Fault("output_dir in use", "another process holds its lock", ("is in use by another run", "started"), (2,),
          prepare=held_by_another),
    Fault("stale lock", "the lock of a process that is gone", ("left its lock behind; taken over",), (0,),
          prepare=left_by_a_killed_run, whole=(1, 2, 3, 4, 5)),
    Fault("report cannot be written", "ascend_report.json is a folder", ("run report", "ascend_report.json"), (0,),
          prepare=report_is_a_folder, whole=(1, 2, 3, 4, 5)),
    Fault("home read-only", "HOME on a read-only file system", ("llamafactory-ascend: completed",), (0,),
          prepare=read_only_home, whole=(1, 2, 3, 4, 5)),
    Fault("cache read-only", "HF_HOME on a read-only file system", ("Read-only file system", "home"),
          prepare=read_only_cache),
    Fault("no temporary folder", "TMPDIR names none", ("llamafactory-ascend: completed",), (0,),
          env={"TMPDIR": "/nowhere"}, whole=(1, 2, 3, 4, 5)),
    Fault("temporary folder full", "TMPDIR on a full file system", ("llamafactory-ascend: completed",), (0,),
          prepare=full_temporary_folder, whole=(1, 2, 3, 4, 5)),
]  # fmt: skip

CHECKPOINTS = [
    Fault("adapter cut off", "half of the checkpoint's adapter", ("checkpoint-2 is not whole", "checkpoint-1"),
          prepare=checkpoint(lambda path: cut(path / "adapter_model.safetensors")), whole=(1,)),
    Fault("adapter empty", "an adapter of no bytes", ("checkpoint-2 is not whole",),
          prepare=checkpoint(lambda path: cut(path / "adapter_model.safetensors", 0)), whole=(1,)),
    Fault("adapter gone", "no adapter in the checkpoint", ("checkpoint-2 is not whole",),
          prepare=checkpoint(lambda path: (path / "adapter_model.safetensors").unlink()), whole=(1,)),
    Fault("adapter config broken", "half of adapter_config.json", ("checkpoint-2", "adapter_config.json"),
          prepare=checkpoint(lambda path: cut(path / "adapter_config.json")), whole=(1,)),
    Fault("optimizer gone", "no optimizer.pt in the checkpoint", ("checkpoint-2", "optimizer.pt"),
          prepare=checkpoint(lambda path: (path / "optimizer.pt").unlink())),
    Fault("optimizer cut off", "half of optimizer.pt", ("checkpoint-2", "optimizer.pt"),
          prepare=checkpoint(lambda path: cut(path / "optimizer.pt"))),
    Fault("scheduler empty", "a scheduler.pt of no bytes", ("checkpoint-2", "scheduler.pt"),
          prepare=checkpoint(lambda path: cut(path / "scheduler.pt", 0))),
    Fault("random state cut off", "half of rng_state.pth", ("checkpoint-2", "rng_state.pth"),
          prepare=checkpoint(lambda path: cut(path / "rng_state.pth"))),
    Fault("trainer state broken", "half of trainer_state.json", ("checkpoint-2", "trainer_state.json", "checkpoint-1"),
          prepare=checkpoint(lambda path: cut(path / "trainer_state.json"))),
    Fault("half a checkpoint", "a kill while checkpoint-3 was saved", ("no trainer_state.json", "checkpoint-2"),
          prepare=partly_saved),
]  # fmt: skip

DATA = [
    Fault("data file gone", "it does not exist", ("tiny.json",), prepare=data("", name="other.json")),
    Fault("data set unknown", "`dataset: tinny`", ("tinny", "tiny"), recipe={"dataset": "tinny"}),
    Fault("dataset_info broken", "a comma too many", ("dataset_info.json", "line 1"),
          prepare=data(json.dumps(ROWS), '{"tiny": {"file_name": "tiny.json"},}')),
    Fault("data with a BOM", "UTF-8 with a byte order mark", ("BOM", "tiny.json"),
          prepare=data(b"\xef\xbb\xbf" + CHINESE.encode())),
    Fault("data in GBK", "Chinese text", ("GBK", "tiny.json"), prepare=data(CHINESE.encode("gbk"))),
    Fault("data cut off", "half of the file", ("tiny.json",), prepare=data(CHINESE.encode()[:900])),
    Fault("data empty", "`[]`", ("tiny.json",), prepare=data("[]")),
    Fault("data of no bytes", "an empty file", ("tiny.json",), prepare=data("")),
    Fault("evaluation set empty", "`eval_dataset` of `[]`", ("tiny.json",), prepare=data("[]"),
          recipe={"dataset": "good", "eval_dataset": "tiny", "eval_strategy": "steps", "eval_steps": 1}),
    Fault("tokenized_path broken", "half of dataset_dict.json", ("tokenized",), prepare=broken_tokenized),
    Fault("picture gone", "missing before the start", ("im0.png",), prepare=pictures, whole=(), kept=False,
          recipe={"model_name_or_path": "qwen25vl", "dataset": "tiny_mm", "template": "qwen2_vl",
                  "max_samples": 16}),
]  # fmt: skip

MODEL = [
    Fault("weights cut off", "half of model.safetensors", ("model.safetensors",),
          prepare=model(lambda path: cut(path / "model.safetensors"))),
    Fault("weights empty", "a model.safetensors of no bytes", ("model.safetensors",),
          prepare=model(lambda path: cut(path / "model.safetensors", 0))),
    Fault("config broken", "half of config.json", ("config.json",),
          prepare=model(lambda path: cut(path / "config.json"))),
    Fault("tokenizer gone", "no tokenizer files", ("tokenizer",),
          prepare=model(lambda path: [file.unlink() for file in path.glob("*token*")])),
    Fault("model gone", "the folder does not exist", ("nowhere",), recipe={"model_name_or_path": "/nowhere/model"}),
]  # fmt: skip

PACKAGES = [
    Fault("torch_npu broken", "its import fails, as without CANN", ("libhccl.so",),
          prepare=package("torch_npu", "raise ImportError('libhccl.so: cannot open shared object file')", "2.10.0")),
    Fault("peft broken", "its import fails", ("peft is broken",),
          prepare=package("peft", "raise ImportError('peft is broken')")),
    Fault("fla broken", "its import fails, on a model with linear attention", ("fla", "llamafactory-ascend: completed"),
          (0,), prepare=lambda scene: [package("fla", "raise ImportError('fla is broken')", "0.4.0")(scene),
                                       shutil.rmtree(scene.output)] and None,
          recipe={"model_name_or_path": "qwen3_5", "template": "qwen3_5_nothink", "max_steps": 2}, npu=True,
          kept=False),
    Fault("wrapt missing", "its import fails", ("Training runs as stock",), (0,),
          prepare=package("wrapt", "raise ModuleNotFoundError(\"No module named 'wrapt'\")"), whole=(1, 2, 3, 4, 5)),
    Fault("plugin raises at import", "a third party's", ("plugin `saboteur` is off", "libsaboteur.so"), (0,),
          env={"SABOTAGE": "import"}, whole=(1, 2, 3, 4, 5)),
    Fault("plugin exits at import", "a third party's", ("plugin `saboteur` is off", "SystemExit: 3"), (0,),
          env={"SABOTAGE": "exit at import"}, whole=(1, 2, 3, 4, 5)),
    Fault("plugin raises in a hook", "a third party's", ("saboteur", "no hook today"), (0,),
          sabotage="hook", whole=(1, 2, 3, 4, 5)),
    Fault("plugin raises in a callback", "a third party's", ("saboteur", "no callback today"), (0,),
          sabotage="callback", whole=(1, 2, 3, 4, 5)),
    Fault("plugin returns nonsense", "17 as sections, a word as a callback", ("saboteur", "ascend_trainer_callbacks"),
          (0,), sabotage="nonsense", whole=(1, 2, 3, 4, 5)),
    Fault("strict, and a plugin raises", "`ascend: {strict: true}`", ("saboteur", "no hook today"),
          sabotage="hook", recipe={"ascend": {"strict": True}}),
    Fault("plugin off half way", "LLAMAFACTORY_ASCEND=0 for the second half", ("train_loss",), (0,),
          env={"LLAMAFACTORY_ASCEND": "0"}, whole=(1, 2, 3, 4, 5)),
]  # fmt: skip

ENVIRONMENT = [
    Fault("torchrun missing", "not on PATH, two ranks", ("llamafactory-ascend: completed",), (0,), 2,
          env={"PATH": "/usr/bin:/bin"}, whole=(1, 2, 3, 4, 5)),
    Fault("port in use", "somebody listens at MASTER_PORT, two ranks", ("EADDRINUSE",), ranks=2,
          prepare=port_in_use),
    Fault("more ranks than cards", "NPROC_PER_NODE=2 on one card", ("NPROC_PER_NODE",), (2,), 2,
          env={"SIM_NPU_DEVICES": "1"}),
    Fault("RANK left over", "RANK=1 of another program", ("RANK",), (1, 2), env={"RANK": "1"}),
    Fault("ranks left over", "all of torchrun's variables, and nobody else comes", ("WORLD_SIZE",), (1, 2),
          env={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": "29871"}, recipe={"ddp_timeout": 10}, npu=True),
    Fault("HCCL_OP_TIMEOUT", "a variable that nobody reads", ("HCCL_OP_TIMEOUT", "llamafactory-ascend: completed"),
          (0,), npu=True, env={"HCCL_OP_TIMEOUT": "600"}, whole=(1, 2, 3, 4, 5)),
    Fault("HCCL_CONNECT_TIMEOUT", "`ten`", ("HCCL_CONNECT_TIMEOUT",), (1, 2), npu=True,
          env={"HCCL_CONNECT_TIMEOUT": "ten"}),
    Fault("stdin closed", "`<&-`", ("llamafactory-ascend: completed",), (0,), shell='"$@" <&-',
          whole=(1, 2, 3, 4, 5)),
]  # fmt: skip

BEFORE = [*ARGUMENTS, *OUTPUT, *CHECKPOINTS, *DATA, *MODEL, *PACKAGES, *ENVIRONMENT]
