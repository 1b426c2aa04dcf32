"""Evaluation rows that training rows ask too."""

from llamafactory_ascend.checks.data.leaks import Leaks
from llamafactory_ascend.checks.data.problem import Limits


def test_leaked_rows_are_counted_with_both_places() -> None:
    for limit, level in ((1.0, "warning"), (0.4, "error")):
        leaks = Leaks(Limits(leaked=limit))
        for number, question in enumerate(["one", "two", "two", "three"]):
            leaks.see_evaluation("e", number, question)
        for number, question in enumerate(["zero", "two", "two", "four"]):
            leaks.see_training("t", number, question)
        (problem,) = leaks.problems()
        assert (problem.level, problem.message) == (
            level,
            "2 of 4 evaluation rows ask what a training row asks: e row 1 = t row 1 (two)",
        )


def test_nothing_in_common() -> None:
    leaks = Leaks()
    leaks.see_evaluation("e", 0, "one")
    leaks.see_training("t", 0, "two")
    assert leaks.problems() == []
