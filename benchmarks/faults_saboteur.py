"""What is done to a run from inside: a plugin that reads SABOTAGE; ``faults_run.py`` installs it.

Almost everything happens in step 4 of a training that resumes behind step 2: two checkpoints of an earlier
process and one of this process exist by then. SABOTAGE_RANK names the one rank that does it.
"""

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamafactory_ascend import hookimpl

KIND = os.environ.get("SABOTAGE", "")
HERE = os.environ.get("SABOTAGE_RANK", "") in ("", os.environ.get("RANK", "0"))
STEP = 3  # complete steps before the one in which it happens

if KIND == "import":
    raise OSError("libsaboteur.so: cannot open shared object file")
if KIND == "exit at import":
    raise SystemExit(3)


def parent(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [other for other in found if parent(other) == pid]


def starve(*_: Any) -> None:
    """Let every further allocation on the simulated NPU fail."""
    import torch

    torch.ops.simnpu.set_limit(torch.npu.current_device(), 0)


def before_forward(model: Any, action: Callable[..., Any]) -> None:
    """Call ``action`` before the model's forward, where its exception is nobody's but the training's."""
    model.register_forward_pre_hook(lambda *_: action() and None)


def change_loss(model: Any, change: Callable[[Any], Any]) -> None:
    """Replace the loss of each forward."""

    def hook(_: Any, __: Any, output: Any) -> Any:
        output["loss"] = change(output["loss"])
        return output

    model.register_forward_hook(hook)


def fail(error: BaseException) -> Callable[..., None]:
    def action(*_: Any, **__: Any) -> None:
        raise error

    return action


def send(number: int, generations: int = 0) -> Callable[..., None]:
    """Return an action that signals this process, its parent (1) or its parent's (2)."""

    def action(*_: Any) -> None:
        pid = os.getpid()
        for _generation in range(generations):
            pid = parent(pid)
        os.kill(pid, number)

    return action


def interrupt_twice(model: Any) -> None:
    before_forward(model, send(signal.SIGINT))
    before_forward(model, send(signal.SIGINT))


def kill_workers(_: Any) -> None:
    for child in children(os.getpid()):
        os.kill(child, signal.SIGKILL)


def limit_files(_: Any) -> None:
    """Let no file grow beyond 4 kB, as a quota would; Python ignores the signal and gets EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def fill_disk(folder: Path) -> None:
    """Write a file until its file system is full."""
    try:
        with (folder / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass
    except OSError:
        return


def remove_pictures(_: Any) -> None:
    for picture in Path(os.environ["SABOTAGE_FOLDER"]).glob("*.png"):
        picture.unlink()


def poison(model: Any) -> None:
    """Let one tensor of the adapter be NaN from now on, whatever the optimizer makes of it."""
    import torch

    name = next(name for name, _ in model.named_parameters() if "lora_B" in name)
    with torch.no_grad():
        model.get_parameter(name).fill_(float("nan"))


def starve_in_backward(model: Any) -> None:
    def hook(_: Any, __: Any, output: Any) -> None:
        output["loss"].register_hook(starve)

    model.register_forward_hook(hook)


def starve_in_evaluation(model: Any) -> None:
    model.register_forward_pre_hook(lambda module, _: None if module.training else starve())


def starve_in_saving(model: Any) -> None:
    def hook(*_: Any) -> None:
        starve()
        next(model.parameters()).clone()

    model.register_state_dict_pre_hook(hook)


IN_STEP: dict[str, Callable[[Any], Any]] = {  # called with the model when the step begins
    "kill": send(signal.SIGKILL),
    "terminate": send(signal.SIGTERM),
    "interrupt": send(signal.SIGINT),
    "hang up": send(signal.SIGHUP),
    "interrupt twice": interrupt_twice,
    "segfault": send(signal.SIGSEGV),
    "exit": lambda _: os._exit(7),
    "raise": lambda model: before_forward(model, fail(ValueError("the layer broke"))),
    "hang": lambda model: before_forward(model, lambda: time.sleep(3600)),
    "kill agent": send(signal.SIGKILL, 1),
    "kill launcher": send(signal.SIGKILL, 2),
    "terminate launcher": send(signal.SIGTERM, 2),
    "kill workers": kill_workers,
    "limit files": limit_files,
    "pictures": remove_pictures,
    "nan": lambda model: change_loss(model, lambda loss: loss * float("nan")),
    "inf": lambda model: change_loss(model, lambda loss: loss * float("inf")),
    "zero": lambda model: change_loss(model, lambda loss: loss * 0),
    "forward": starve,
    "backward": starve_in_backward,
    "evaluation": starve_in_evaluation,
    "saving": starve_in_saving,
}


@hookimpl
def ascend_after_model(run: Any, model: Any) -> None:
    if KIND == "hook":
        raise ZeroDivisionError("no hook today")


@hookimpl
def ascend_report_sections(run: Any) -> Any:
    return 17 if KIND == "nonsense" else {}


@hookimpl
def ascend_trainer_callbacks(run: Any, trainer: Any) -> list[Any]:
    from transformers import TrainerCallback

    output = Path(trainer.args.output_dir)

    class Saboteur(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if not HERE or state.global_step != STEP:
                return
            if KIND == "callback":
                raise ZeroDivisionError("no callback today")
            if KIND in IN_STEP:
                IN_STEP[KIND](model)
            if KIND == "fill":
                fill_disk(output)
            if KIND == "remove output":
                shutil.rmtree(output)
            if KIND == "report":
                (output / "ascend_report.json").unlink()
                (output / "ascend_report.json").mkdir()
            if KIND == "kill while saving":
                trainer._save_optimizer_and_scheduler = send(signal.SIGKILL)
            if KIND == "no space":
                trainer._save_optimizer_and_scheduler = fail(OSError(28, "No space left on device"))

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if KIND == "optimizer":  # in the first step, where it allocates its state
                starve()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if KIND == "poison" and state.global_step == state.max_steps:
                poison(model)

    return ["no callback"] if KIND == "nonsense" else [Saboteur()]  # type: ignore[list-item]
