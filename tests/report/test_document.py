"""The verdict follows from the facts, and a run's name from its launcher."""

import os
import socket
from typing import Any

import pytest

from llamafactory_ascend.report.document import (
    UNFINISHED,
    has_launcher,
    list_ranks,
    run_key,
    run_name,
    spans_nodes,
    verdict,
)

RUNNING: dict[str, Any] = {"failures": [], "launcher": None, "ended_ranks": [], "last_step": 3}


def failure(rank: int, **changes: Any) -> dict[str, Any]:
    found = {"rank": rank, "phase": "backward", "step": 3, "refused": False, "stopped": False}
    said = {"type": "OutOfMemoryError", "headline": "too much", "message": "too much\nhint"}
    return {**found, **said, **changes}


STOPS = [failure(rank, stopped=True, message="SIGTERM: stopped after step 3") for rank in (1, 0)]


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
            "killed or lost after step 3: rank 0-2,5; torchrun ended with exit code 1",
        ),
        (  # the first to speak only tells of the one that died
            {
                "failures": [failure(0, type="RuntimeError", message="gloo: Connection closed by peer")],
                "launcher": {"exit_code": 1, "unfinished_ranks": [1]},
                "ended_ranks": [0],
            },
            "failed",
            "killed or lost after step 3: rank 1; then rank 0 failed in backward after step 3: "
            "RuntimeError: too much; torchrun ended with exit code 1",
        ),
        (  # torchrun has ended rank 0 because rank 1 failed
            {
                "failures": [failure(1)],
                "launcher": {"exit_code": 1, "unfinished_ranks": [0]},
                "ended_ranks": [1],
            },
            "failed",
            "rank 1 failed in backward after step 3: OutOfMemoryError: too much; "
            "torchrun ended with exit code 1; killed or lost after step 3: rank 0",
        ),
        (
            {"launcher": {"exit_code": None, "unfinished_ranks": []}, "ended_ranks": [0]},
            "failed",
            "the launcher was interrupted",
        ),
        ({"failures": STOPS, "ended_ranks": [0, 1]}, "stopped", "SIGTERM: stopped after step 3"),
        (  # torchrun ends with 1 because its ranks have
            {"failures": STOPS, "launcher": {"exit_code": 1, "unfinished_ranks": []}},
            "stopped",
            "SIGTERM: stopped after step 3",
        ),
        (  # while it was loaded, in a collective
            {
                "failures": [STOPS[0], failure(0, type="RuntimeError", message="gloo: Connection closed")],
                "launcher": {"exit_code": 1, "unfinished_ranks": []},
            },
            "stopped",
            "SIGTERM: stopped after step 3",
        ),
        (  # one was too slow
            {"failures": STOPS[:1], "launcher": {"exit_code": 1, "unfinished_ranks": [0]}},
            "failed",
            "rank 1 failed in backward after step 3: OutOfMemoryError: too much; "
            "torchrun ended with exit code 1; killed or lost after step 3: rank 0",
        ),
        (  # its launcher has stopped them because torchrun was killed
            {"failures": STOPS[:1], "launcher": {"exit_code": -9, "unfinished_ranks": []}},
            "failed",
            "rank 1 failed in backward after step 3: OutOfMemoryError: too much; "
            "torchrun ended with exit code -9",
        ),
        (
            {"failures": [*STOPS[:1], failure(0)]},
            "failed",
            "rank 1 failed in backward after step 3: OutOfMemoryError: too much; then failed: rank 0",
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
    assert (
        run_name({**node, "RANK": "0"}) == run_name({**node, "RANK": "1"}) == f"none-h-29500-{os.getppid()}"
    )
    ours = {**torchrun, "LLAMAFACTORY_ASCEND_RUN": "abc"}
    assert run_name(ours) == "abc"
    assert run_key(["abc"], ours, 1) == "abc.0.1"
    assert run_key(["abc"], {**ours, "TORCHELASTIC_RESTART_COUNT": "2"}, 1) == "abc.2.1"
    assert run_key(["abc"], ours, 2) == "abc.0.2"
    assert run_name({}).startswith(f"{socket.gethostname()}-{os.getpid()}-")


def test_several_nodes_share_a_key_and_each_of_their_launchers_knows_it() -> None:
    nodes = {"MASTER_PORT": "29500", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert spans_nodes(nodes)
    assert not spans_nodes({**nodes, "LOCAL_WORLD_SIZE": "4"})
    assert not spans_nodes({})
    key = run_key(["abc", "abc", "def", "def"], nodes, 1)
    assert key == "abc+def.0.1"
    assert [has_launcher({"run": key}, name) for name in ("abc", "def", "ab", "")] == [
        True,
        True,
        False,
        False,
    ]
    assert not has_launcher({}, "abc")
    year = run_name(nodes).split("-")[1]  # the same port is used for the next run too, so the time is in it
    assert int(year) >= 2026
