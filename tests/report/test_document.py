"""The verdict follows from the facts, and a run's name from its launcher."""

from typing import Any

import pytest

from llamafactory_ascend.report.document import UNFINISHED, list_ranks, run_key, verdict

RUNNING: dict[str, Any] = {"failures": [], "launcher": None, "ended_ranks": [], "last_step": 3}


def failure(rank: int, **changes: Any) -> dict[str, Any]:
    found = {"rank": rank, "phase": "backward", "step": 3, "refused": False, "type": "OutOfMemoryError"}
    return {**found, "headline": "too much", "message": "too much\nhint", **changes}


@pytest.mark.parametrize(
    ("facts", "state", "explanation"),
    [
        ({}, "unfinished", UNFINISHED),
        ({"ended_ranks": [1]}, "unfinished", UNFINISHED),
        ({"ended_ranks": [0]}, "completed", ""),
        (
            {"failures": [failure(1)], "ended_ranks": [0, 1]},
            "failed",
            "rank 1 failed in backward after step 3: OutOfMemoryError: too much",
        ),
        (
            {"failures": [failure(1, step=0), failure(0), failure(2)]},
            "failed",
            "rank 1 failed in backward before the first step was done: OutOfMemoryError: too much; "
            "then failed: rank 0,2",
        ),
        ({"failures": [failure(0, refused=True)]}, "refused", "too much\nhint"),
        (
            {"launcher": {"exit_code": 1, "unfinished_ranks": [0, 1, 2, 5]}, "ended_ranks": [3, 4]},
            "failed",
            "torchrun ended with exit code 1; killed or lost after step 3: rank 0-2,5",
        ),
        (
            {"launcher": {"exit_code": None, "unfinished_ranks": []}, "ended_ranks": [0]},
            "failed",
            "the launcher was interrupted",
        ),
    ],
)
def test_verdict(facts: dict[str, Any], state: str, explanation: str) -> None:
    assert verdict({**RUNNING, **facts}) == (state, explanation)


def test_list_ranks() -> None:
    assert list_ranks([7, 0, 1, 2, 5, 5]) == "0-2,5,7"


def test_all_ranks_of_a_run_have_one_key_and_no_other_run_has() -> None:
    torchrun = {"MASTER_ADDR": "h", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
    node = {**torchrun, "LOCAL_WORLD_SIZE": "2"}
    assert run_key({**node, "RANK": "0"}, 1) == run_key({**node, "RANK": "1"}, 1)
    nodes = {**torchrun, "LOCAL_WORLD_SIZE": "1"}
    assert run_key(nodes, 1) == "none-h-29500.0.1"  # parents differ from node to node
    ours = {**torchrun, "LLAMAFACTORY_ASCEND_RUN": "abc"}
    assert run_key(ours, 1) == "abc.0.1"
    assert run_key({**ours, "TORCHELASTIC_RESTART_COUNT": "2"}, 1) == "abc.2.1"
    assert run_key(ours, 2) == "abc.0.2"
    assert run_key({}, 1).endswith(".0.1")
