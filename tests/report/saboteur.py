"""A third party's plugin that does to a run what SABOTAGE says; see ``install``."""

import os
import time
from pathlib import Path
from typing import Any

from llamafactory_ascend import hookimpl
from llamafactory_ascend.errors import AscendError

KIND, _, RANK = os.environ.get("SABOTAGE", "").partition(":")
HERE = not RANK or os.environ.get("RANK", "0") == RANK


def install(folder: Path) -> dict[str, str]:
    """Install this module as a plugin into a folder; return the environment that lets a run find it."""
    info = folder / "saboteur-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saboteur\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[llamafactory_ascend]\nsaboteur = saboteur\n")
    (folder / "saboteur.py").write_text(Path(__file__).read_text())
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@hookimpl
def ascend_arguments(run: Any, arguments: Any) -> None:
    if KIND == "refuse":
        raise AscendError("this plugin does not like the recipe", "take another")


@hookimpl
def ascend_after_model(run: Any, model: Any) -> None:
    import torch

    steps = []

    def in_backward(_: Any) -> None:
        torch.ops.simnpu.set_limit(torch.npu.current_device(), 0)

    def after_forward(_: Any, __: Any, output: Any) -> None:
        steps.append(1)
        if KIND == "slow":
            time.sleep(0.2)
        if HERE and len(steps) == 3:
            if KIND == "memory":
                output["loss"].register_hook(in_backward)
            if KIND == "kill":
                os.kill(os.getpid(), 9)

    model.register_forward_hook(after_forward)


@hookimpl
def ascend_report_sections(run: Any) -> dict[str, Any]:
    if KIND == "report":
        raise ZeroDivisionError("no section today")
    return {"saboteur": {"loss": float("nan")}}


@hookimpl
def ascend_trainer_callbacks(run: Any, trainer: Any) -> list[Any]:
    from transformers import TrainerCallback

    class Leave(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            raise SystemExit(3)

    return [Leave()] if KIND == "exit" else []
