"""Trainings that fail in every phase, one after the other in one process, as a notebook would run them.

``python gauntlet.py BASE_RECIPE.json OUTPUT`` writes OUTPUT/<scenario>/ascend_report.json for each and
OUTPUT/outcomes.json: what the caller of ``run_exp`` saw.
"""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from llamafactory.train.tuner import run_exp
from transformers import TrainerCallback

LIMIT = 64 << 30


def starve() -> None:
    """Let every further allocation on the simulated NPU fail."""
    torch.ops.simnpu.set_limit(0, 0)


class At(TrainerCallback):
    """Calls ``action(model)`` at an event of the Trainer, after the given number of steps."""

    def __init__(self, event: str, action: Callable[[Any], Any], step: int = 1) -> None:
        def call(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == step:
                action(model)

        setattr(self, event, call)


def fail(error: BaseException) -> Callable[..., None]:
    def action(*args: Any, **kwargs: Any) -> None:
        raise error

    return action


def in_backward(model: Any) -> None:
    model.register_forward_hook(
        lambda _, __, output: output["loss"].register_hook(lambda _: starve()) and None
    )


def in_recomputation(model: Any) -> None:
    layer, calls = model.base_model.model.model.language_model.layers[3].mlp, []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            starve()

    layer.register_forward_pre_hook(hook)


def in_evaluation(model: Any) -> None:
    model.register_forward_pre_hook(lambda module, _: None if module.training else starve())


def in_saving(model: Any) -> None:
    def hook(*_: Any) -> None:
        starve()
        next(model.parameters()).clone()

    model.base_model.register_state_dict_pre_hook(hook)


def chained(model: Any) -> None:
    def hook(*_: Any) -> None:
        try:
            starve()
            torch.ones(9, device="npu")
        except torch.OutOfMemoryError as error:
            raise ValueError("the layer broke") from error

    model.register_forward_pre_hook(hook)


def chained_silently(model: Any) -> None:
    def hook(*_: Any) -> None:
        try:
            starve()
            torch.ones(9, device="npu")
        except torch.OutOfMemoryError:
            raise RuntimeError("a library hides the cause") from None

    model.register_forward_pre_hook(hook)


def old_torch_npu(model: Any) -> None:
    error = RuntimeError("NPU out of memory. Tried to allocate 138.00 MiB (NPU 0; 60.97 GiB total capacity)")
    model.register_forward_pre_hook(fail(error))


def no_space(model: Any) -> None:
    model.save_pretrained = fail(OSError(28, "No space left on device"))


def scenarios(
    base: dict[str, Any], folder: Path
) -> Iterator[tuple[str, dict[str, Any], list[TrainerCallback]]]:
    evaluation = {"eval_dataset": "tiny", "max_samples": 8, "do_eval": True}
    bare = folder / "bare"
    bare.mkdir()
    shutil.copy(Path(base["model_name_or_path"]) / "config.json", bare)
    (bare / "tokenizer.json").write_text("{}")  # JSON, as far as the files are looked at before
    no_weights = folder / "no_weights"
    shutil.copytree(base["model_name_or_path"], no_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    broken = folder / "broken_data"
    broken.mkdir()
    (broken / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
    (broken / "tiny.json").write_text('[{"instruction": "only half a')

    yield "tokenizer", {"model_name_or_path": str(bare)}, []
    yield "load", {"model_name_or_path": str(no_weights)}, []
    unseen = {"data": {"seconds": 0}}  # else the rows are looked at before
    yield "dataset", {"dataset_dir": str(broken), "ascend": unseen}, []
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    os.environ.update(fsdp)
    yield "refused", {}, []
    for key in fsdp:
        del os.environ[key]
    starve()
    yield "oom_loading", {}, []
    yield "oom_forward", {}, [At("on_step_begin", lambda _: starve())]
    yield "oom_backward", {}, [At("on_step_begin", in_backward)]
    yield "oom_recompute", {}, [At("on_step_begin", in_recomputation)]
    yield "oom_reentrant", {"ascend": {"checkpointing": False}}, [At("on_step_begin", in_recomputation)]
    yield "oom_optimizer", {}, [At("on_pre_optimizer_step", lambda _: starve(), 0)]
    yield (
        "oom_evaluation",
        {**evaluation, "eval_strategy": "steps", "eval_steps": 1},
        [At("on_step_end", in_evaluation)],
    )
    yield "oom_saving", {}, [At("on_train_end", in_saving, 2)]
    yield "chained", {}, [At("on_step_begin", chained)]
    yield "chained_silently", {}, [At("on_step_begin", chained_silently)]
    yield "old_torch_npu", {}, [At("on_step_begin", old_torch_npu)]
    yield "callback", {}, [At("on_step_end", fail(ZeroDivisionError("by a callback")))]
    yield "interrupt", {}, [At("on_step_end", fail(KeyboardInterrupt()))]
    yield "exit", {}, [At("on_step_end", fail(SystemExit(3)))]
    yield "saving", {}, [At("on_train_end", no_space, 2)]
    yield "checkpoint", {"save_strategy": "steps", "save_steps": 1}, [At("on_step_end", no_space)]
    yield "evaluation", evaluation, [At("on_prediction_step", fail(ValueError("while evaluating")), 2)]
    yield "eval_only", {**evaluation, "do_train": False}, []
    yield "completed", {}, []


def main() -> None:
    base, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    folder.mkdir()
    outcomes: dict[str, Any] = {}
    hook = sys.excepthook
    for name, changes, callbacks in scenarios(base, folder):
        recipe = {**base, "output_dir": str(folder / name), **changes}
        try:
            run_exp(recipe, callbacks)
            outcomes[name] = "returned"
        except BaseException as error:
            outcomes[name] = type(error).__name__
        finally:
            torch.ops.simnpu.set_limit(0, LIMIT)
        if name == "tokenizer":
            hook = sys.excepthook
    outcomes["one excepthook"] = sys.excepthook is hook
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
