"""A signal ends a training after the step it is in, with a checkpoint; and checkpoints by the clock."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from llamafactory_ascend.features import stopping, timed_checkpoints
from llamafactory_ascend.features.stopping_callback import Stopping
from llamafactory_ascend.launching import signals
from llamafactory_ascend.run import Arguments, Run
from tests.training import Do, trainer


class Tiny(nn.Module):
    """A model of one weight that takes what the tests' trainer feeds it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.weight[input_ids % 64].square().mean()}


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    signals.requests.end()  # another test may have parsed arguments in this process
    before = [signal.getsignal(number) for number in signals.STOPPING]
    yield
    signals.requests.end()
    assert [signal.getsignal(number) for number in signals.STOPPING] == before


def run_of(stage: str = "sft", given: tuple[str, ...] = ()) -> Run:
    arguments = Arguments(None, None, SimpleNamespace(do_train=True), SimpleNamespace(stage=stage), None)
    return Run(arguments=arguments, given=frozenset(given))


def prepared(folder: Path, *callbacks: TrainerCallback, run: Run | None = None, **changes: Any) -> Any:
    made = trainer(Tiny(), folder, *callbacks, **{"gradient_checkpointing": False, "max_steps": 6, **changes})
    made.add_callback(Stopping(run or run_of(), made))
    return made


def kill(number: int, step: int) -> TrainerCallback:
    """Send this process a signal in the middle of a step."""

    class Kill(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step - 1:
                os.kill(os.getpid(), number)

    return Kill()


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_sigterm_saves_the_step_it_comes_in_and_ends_with_143(tmp_path: Path) -> None:
    made = prepared(tmp_path, kill(signal.SIGTERM, 3))  # `save_strategy: no`, as everywhere in the tests
    with pytest.raises(signals.Stopped) as error:
        made.train()
    assert error.value.code == 143
    saved = f"{tmp_path}/checkpoint-3 is saved, and the same command resumes from it"
    assert str(error.value) == f"SIGTERM: stopped after step 3; {saved}"
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    assert json.loads((tmp_path / "checkpoint-3/trainer_state.json").read_text())["global_step"] == 3
    signals.requests.end()
    resumed = prepared(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    whole = prepared(tmp_path / "whole")
    whole.train()
    assert resumed.state.global_step == 6 and torch.equal(resumed.model.weight, whole.model.weight)


def test_a_trainer_alone_leaves_sigterm_deadly(tmp_path: Path) -> None:
    """What stock does: no handler, so the step, the optimizer and the report are lost."""
    seen: list[Any] = []
    look = Do("on_step_begin", lambda _: seen.append(signal.getsignal(signal.SIGTERM)))
    trainer(Tiny(), tmp_path, look, gradient_checkpointing=False, max_steps=1).train()
    prepared(tmp_path, look, max_steps=1).train()
    assert seen[0] is signal.SIG_DFL and seen[1] == signals.requests._heard


def test_ctrl_c_saves_and_a_second_one_does_not_wait(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match="SIGINT: stopped after step 2"):
        prepared(tmp_path / "once", kill(signal.SIGINT, 2)).train()
    assert checkpoints(tmp_path / "once") == ["checkpoint-2"]
    signals.requests.end()
    twice = (kill(signal.SIGINT, 2), kill(signal.SIGINT, 2))
    with pytest.raises(KeyboardInterrupt, match="a second SIGINT"):
        prepared(tmp_path / "twice", *twice).train()
    assert checkpoints(tmp_path / "twice") == []


def test_a_second_sigterm_is_not_heard_twice(tmp_path: Path) -> None:
    """torchrun sends one to every rank as soon as the first has ended."""
    with pytest.raises(signals.Stopped):
        prepared(tmp_path, kill(signal.SIGTERM, 2), Do("on_save", lambda _: os.kill(os.getpid(), 15))).train()
    os.kill(os.getpid(), signal.SIGTERM)
    assert checkpoints(tmp_path) == ["checkpoint-2"]


def test_a_stop_during_an_evaluation_waits_for_its_end_and_for_no_step(tmp_path: Path) -> None:
    evaluating = Do("on_prediction_step", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    with pytest.raises(signals.Stopped, match="after step 2"):
        prepared(tmp_path / "no", evaluating, **settings).train()
    assert checkpoints(tmp_path / "no") == ["checkpoint-2"]
    signals.requests.end()
    best = {"save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": True}
    stop_at_4 = kill(signal.SIGTERM, 4)  # `best` would save where the loss has grown, and it never does
    with pytest.raises(signals.Stopped, match="after step 4"):
        prepared(tmp_path / "best", stop_at_4, **settings, **best).train()
    assert "checkpoint-4" in checkpoints(tmp_path / "best")


@pytest.mark.parametrize("number", signals.STOPPING)
def test_outside_a_training_a_signal_stops_at_once(number: signal.Signals) -> None:
    stopping.ascend_arguments(run_of(), None)  # type: ignore[arg-type]
    with pytest.raises((signals.Stopped, KeyboardInterrupt), match=f"{number.name}: .* to save") as error:
        os.kill(os.getpid(), number)
        time.sleep(1)
    assert signals.is_stop(error.value)  # so that the report says `stopped`
    assert getattr(error.value, "code", 130) == 128 + number


def test_a_signal_while_the_last_model_is_saved_waits_for_it(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    made.train()
    os.kill(os.getpid(), signal.SIGTERM)  # in save_model
    with pytest.raises(signals.Stopped, match="once the model was saved"):
        stopping.ascend_saved(run_of(), made)


def test_an_ignored_sigint_stays_ignored(tmp_path: Path) -> None:
    """A shell starts background jobs of a script so: Ctrl-C is not for them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        made = prepared(tmp_path, kill(signal.SIGINT, 2))
        made.train()
        assert made.state.global_step == 6
    finally:
        signals.requests.end()
        signal.signal(signal.SIGINT, before)


def test_a_checkpoint_without_optimizer_is_not_called_resumable(tmp_path: Path) -> None:
    with pytest.raises(signals.Stopped, match="without what a resumed run needs"):
        prepared(tmp_path, kill(signal.SIGTERM, 2), save_only_model=True).train()


def test_workers_of_a_data_loader_survive_a_signal_to_the_group(tmp_path: Path) -> None:
    """torchrun's reaches every process of a rank's group."""

    def groups(_: nn.Module) -> None:
        (tmp_path / "group").write_text(str(os.getpgid(0)))

    signals.requests.hold()
    pid = os.fork()
    if pid == 0:
        groups(Tiny())
        os._exit(0)
    os.waitpid(pid, 0)
    assert int((tmp_path / "group").read_text()) == pid != os.getpgid(0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_checkpoints, "SECONDS", 0.2)


def nap(step: int) -> TrainerCallback:
    class Nap(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step - 1:
                time.sleep(0.25)

    return Nap()


@pytest.mark.usefixtures("quick")
def test_a_short_run_is_saved_by_the_clock_and_keeps_one_such_checkpoint(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    look = Do("on_step_begin", lambda _: seen.append(checkpoints(tmp_path)))
    run = run_of()
    made = prepared(tmp_path, nap(2), nap(4), look, run=run, save_strategy="steps", save_steps=500)
    made.train()
    assert seen == [[], [], ["checkpoint-2"], ["checkpoint-2"], ["checkpoint-4"], ["checkpoint-4"]]
    assert checkpoints(tmp_path) == ["checkpoint-6"]  # the host's own, at the end
    assert not (tmp_path / "checkpoint-6" / timed_checkpoints.MARK).exists()
    assert run.decisions["timed checkpoints"].choice.startswith("every ")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("given", "changes", "saved", "reason"),
    [
        (("save_strategy",), {"save_strategy": "no"}, [], "`save_strategy: no`"),
        (("save_steps",), {"save_strategy": "steps", "save_steps": 4}, [4, 6], "saves first at step 4"),
        (("save_steps",), {"save_strategy": "steps", "save_steps": 9}, [6], "before the last step (6)"),
        ((), {"save_strategy": "steps", "save_steps": 5}, [5, 6], "neither `save_strategy` nor"),
    ],
)
def test_what_the_recipe_says_of_checkpoints(
    tmp_path: Path, given: tuple[str, ...], changes: dict[str, Any], saved: list[int], reason: str
) -> None:
    run = run_of(given=given)
    made = prepared(tmp_path, nap(2), run=run, **changes)
    timed: list[list[str]] = []
    made.add_callback(Do("on_save", lambda _: timed.append(checkpoints(tmp_path))))
    made.train()
    assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in saved]
    decision = run.decisions["timed checkpoints"]
    assert reason in decision.reason
    assert (["checkpoint-2"] in timed) == (decision.choice != "off")


def test_no_room_no_checkpoint(tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    clock = timed_checkpoints.Clock(tmp_path)
    clock.last -= 1
    assert clock.is_due(7)
    clock.size = 1 << 60
    assert not clock.is_due(7)
    assert "no checkpoint at step 7" in capsys.readouterr().err
