"""Patches that do not stand alike on all ranks."""

from typing import Any

from llamafactory_ascend.report.gathering import foreign_findings, patch_differences
from llamafactory_ascend.run import Finding


def rank(number: int, **patches: list[str]) -> dict[str, Any]:
    return {"rank": number, "patches": patches}


def test_ranks_that_agree() -> None:
    assert patch_differences([rank(n, a=["hit", "untested"]) for n in range(8)]) == []


def test_a_patch_that_failed_on_some_ranks() -> None:
    ranks = [rank(n, a=["hit", ""], b=["hit", ""]) for n in range(6)]
    for n in (2, 3, 5):
        ranks[n]["patches"]["b"] = ["failed", "refused: parameters"]
    assert patch_differences(ranks) == [
        {"id": "b", "harmful": True, "states": {"hit": "0-1,4", "failed: refused: parameters": "2-3,5"}}
    ]


def test_a_patch_that_only_rank_0_has_called_is_no_harm() -> None:
    assert patch_differences([rank(0, a=["hit", ""]), rank(1, a=["verified", ""])]) == [
        {"id": "a", "harmful": False, "states": {"hit": "0", "verified": "1"}}
    ]


def test_a_patch_that_a_rank_does_not_know() -> None:
    assert patch_differences([rank(0, a=["hit", ""]), rank(1)]) == [
        {"id": "a", "harmful": True, "states": {"hit": "0", "planned: unknown to this rank": "1"}}
    ]


def test_what_only_other_ranks_have_found_names_them() -> None:
    here, there = ["warning", "a", "everywhere"], ["warning", "checkpointing", "a layer never ran"]
    found = [[here], [here, there], [here], [there, here]]
    ranks = [{"rank": number, "findings": findings} for number, findings in enumerate(found)]
    assert foreign_findings(ranks) == [Finding("warning", "checkpointing", "rank 1,3: a layer never ran")]
