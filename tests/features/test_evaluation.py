"""Evaluation: how many batches each rank gets, and the last one, which is not done twice."""

import functools
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, SequentialSampler

from llamafactory_ascend import run as run_module
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features import evaluation
from llamafactory_ascend.host.evaluation import evaluate
from llamafactory_ascend.run import Arguments, Run
from tests.features.test_stopping import Tiny
from tests.training import Do, trainer


@pytest.mark.parametrize(("drop_last", "even"), list(itertools.product((False, True), repeat=2)))
def test_batches_are_as_accelerate_deals_them(drop_last: bool, even: bool) -> None:
    for rows, ranks, size in itertools.product((1, 3, 6, 7, 16), (2, 8), (1, 2)):
        sampler = BatchSampler(SequentialSampler(range(rows)), size, drop_last)
        dealt = [
            sum(1 for _ in BatchSamplerShard(sampler, ranks, rank, even_batches=even))
            for rank in range(ranks)
        ]
        found = evaluation.batches(rows, ranks, size, drop_last, even)
        assert found == (min(dealt), max(dealt)), (rows, ranks, size)


def judged(rows: Any, ranks: int = 8, even: bool = True, **changes: Any) -> Run:
    run = Run()
    args = {"world_size": ranks, "eval_batch_size": 1, "do_eval": True, "eval_strategy": "no"}
    args |= {
        "dataloader_drop_last": False,
        "accelerator_config": SimpleNamespace(even_batches=even),
        **changes,
    }
    made: Any = SimpleNamespace(args=SimpleNamespace(**args), eval_dataset=rows)
    assert evaluation.ascend_trainer_callbacks(run, made) == []
    return run


def test_fewer_rows_than_ranks_are_a_finding() -> None:
    (finding,) = judged([0] * 6).findings
    assert (finding.level, finding.subject) == ("note", "evaluation")
    assert finding.message.startswith("6 evaluation rows, 8 ranks, batches of 1: rows are repeated")
    assert (
        judged([0] * 8).findings == judged([0] * 6, ranks=1).findings == judged([0], do_eval=False).findings
    )
    assert judged(iter([0])).findings == []  # streaming: nobody knows


def test_where_it_would_hang_it_is_refused_before_the_start() -> None:
    with pytest.raises(
        AscendError, match=r"6 evaluation rows \(small\), 8 ranks, .* others 0, and those wait"
    ):
        judged({"large": [0] * 16, "small": [0] * 6}, even=False)
    assert judged([0] * 16, even=False).findings == []
    (finding,) = judged([0] * 6, dataloader_drop_last=True).findings
    assert finding.level == "warning" and "none of them is evaluated" in finding.message


@pytest.mark.parametrize(
    ("changes", "levels"),
    [
        ({}, ["note"]),
        ({"max_samples": 2}, ["note"]),
        ({"rows": 8, "max_samples": 6}, ["note"]),
        ({"rows": 8}, []),
        ({"rows": None}, []),  # not all of them were read
        ({"streaming": True}, []),
        ({"more": 2}, []),  # 6 and 2 are one data set of 8
        ({"more": 2, "eval_on_each_dataset": True}, ["note", "note"]),
        ({"even": False}, ["error"]),
        ({"drop_last": True}, ["warning"]),
        ({"rows": 12, "even": False}, []),  # 12 or, where the host leaves rows out, 8: the Trainer knows
        ({"ranks": 1}, []),
    ],
)
def test_too_few_rows_are_said_before_the_model_is_loaded(changes: dict[str, Any], levels: list[str]) -> None:
    case = {
        "rows": 6,
        "more": None,
        "ranks": 8,
        "even": True,
        "drop_last": False,
        "max_samples": None,
        **changes,
    }
    names = ["a"] if case["more"] is None else ["a", "b"]
    training = SimpleNamespace(
        world_size=case["ranks"], eval_batch_size=1, do_eval=True, eval_strategy="no",
        dataloader_drop_last=case["drop_last"], accelerator_config=SimpleNamespace(even_batches=case["even"]),
    )  # fmt: skip
    data = SimpleNamespace(
        eval_dataset=names, max_samples=case["max_samples"], streaming=case.get("streaming", False),
        eval_on_each_dataset=case.get("eval_on_each_dataset", False),
    )  # fmt: skip
    counted = {name: case[key] for name, key in (("a", "rows"), ("b", "more")) if case[key] is not None}
    arguments = Arguments(None, data, training, None, None)
    assert [finding.level for finding in evaluation.judge_early(arguments, counted)] == levels


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Trainer.evaluate with the patch, in a run that came through the host."""
    original = transformers.Trainer.evaluate
    monkeypatch.setattr(
        transformers.Trainer,
        "evaluate",
        lambda self, *args, **named: evaluate(original, self, *args, **named),
    )
    run = Run(arguments=Arguments(None, None, None, None, None))
    monkeypatch.setattr(run_module, "current", functools.cache(lambda: run))
    return run


def trained(folder: Path, **changes: Any) -> tuple[Any, list[int]]:
    """A trainer whose last step was evaluated, and the number of evaluation steps it has done so far."""
    steps: list[int] = []
    count = Do("on_prediction_step", lambda _: steps.append(1))
    settings = {"eval_strategy": "steps", "eval_steps": 2, "gradient_checkpointing": False, **changes}
    made = trainer(Tiny(), folder, count, **settings)
    made.args.predict_with_generate = changes.get("predict_with_generate", False)
    made.train()
    return made, steps


def test_stock_evaluates_the_last_step_twice(tmp_path: Path) -> None:
    made, steps = trained(tmp_path)
    once = len(steps)
    made.evaluate(metric_key_prefix="eval")
    assert len(steps) == 2 * once > 0


def test_the_last_evaluation_is_answered_from_the_one_before(tmp_path: Path, patched: Run) -> None:
    made, steps = trained(tmp_path)
    once = len(steps)
    metrics = made.evaluate(metric_key_prefix="eval")
    assert len(steps) == once
    logged = next(entry for entry in reversed(made.state.log_history) if "eval_loss" in entry)
    assert metrics == {key: value for key, value in logged.items() if key != "step"}
    assert {"eval_loss", "eval_runtime", "epoch"} <= metrics.keys() and math.isfinite(metrics["eval_loss"])
    assert patched.decisions["last evaluation"].choice == "not repeated"
    made.evaluate(metric_key_prefix="test")
    assert len(steps) == 2 * once


def test_other_weights_data_or_arguments_are_evaluated(tmp_path: Path, patched: Run) -> None:
    made, steps = trained(tmp_path / "weights")
    once, before = len(steps), made.evaluate()["eval_loss"]
    with torch.no_grad():
        made.model.weight += 1  # by a callback at the end, say
    assert made.evaluate()["eval_loss"] != before and len(steps) == 2 * once
    made.evaluate(made.eval_dataset)
    assert len(steps) == 3 * once
    best = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2}
    made, steps = trained(tmp_path / "best", **best)
    once = len(steps)
    made.evaluate()
    assert len(steps) == 2 * once


def test_a_step_that_was_not_evaluated_is(tmp_path: Path, patched: Run) -> None:
    made, steps = trained(tmp_path, eval_strategy="epoch", max_steps=-1, num_train_epochs=1)
    once = len(steps)
    made.state.global_step += 1
    made.evaluate()
    assert len(steps) == 2 * once
