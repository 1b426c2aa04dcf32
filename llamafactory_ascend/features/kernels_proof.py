"""Proof of the kernels: probed and counted in the first step of a training, the same on every rank."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback

from llamafactory_ascend import log
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.layers import component_of, plain_name
from llamafactory_ascend.kernels.attestation import Attestation
from llamafactory_ascend.kernels.selection import STOCK

if TYPE_CHECKING:
    from llamafactory_ascend.features.kernels import Plan
    from llamafactory_ascend.run import Run

State = dict[tuple[str, str], tuple[str, dict[str, str]]]  # of each switch: its back end, what it gave up


class KernelsProof(TrainerCallback):  # type: ignore[misc]
    """Arms the probes, counts the calls of the first step that ends, and keeps the ranks together.

    A back end can be given up where it is first called, on one rank alone, with no other there to be asked.
    So the ranks agree at the next point that all of them pass, the end of the step or of the evaluation,
    until every back end has been probed on every rank.
    """

    def __init__(self, run: "Run", plan: "Plan") -> None:
        self.run, self.plan = run, plan
        self.attestation: Attestation | None = None
        self.settled = False
        self.said: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()  # of a begin that never came to the end of a step
        self.plan.attested, self.plan.begun, self.settled = None, True, False
        self.agree()

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if not self.settled:
            for switch in self.plan.done.switches.values():
                switch.armed = switch.comparison is None
        if self.attestation is None and self.plan.attested is None:
            self.attestation = Attestation(self.plan.done.slots)
            self.attestation.start()

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        counted = self.attestation.result() if self.attestation is not None else None
        self.close()
        if not self.settled:
            self.agree()
            for switch in self.plan.done.switches.values():
                skipped = switch.comparison.skipped if switch.comparison is not None else ""
                if skipped:
                    problem = f"{switch.backend} was not compared with {switch.place}: {skipped}"
                    self.miss(switch.operator, problem)
        if counted is None:
            return
        self.plan.attested = counted
        for operator, counts in counted.items():
            for problem in judge(counts):
                self.miss(operator, problem)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.settled:
            self.agree()

    def miss(self, operator: str, problem: str) -> None:
        message = f"{operator}: {problem}"
        if log.rank() and message not in self.said:  # a finding is printed by rank 0 alone
            log.warn(f"kernels: {message}", every_rank=True)
        self.said.add(message)
        self.run.miss("kernels", message)

    def agree(self) -> None:
        """Let every rank give up what one had to give up: all go on with the same back ends.

        Raises:
            AscendError: they differ all the same, or what is given up was named by the user.
        """
        from llamafactory_ascend.report.gathering import all_gather

        switches = self.plan.done.switches
        settled = all(switch.settled for switch in switches.values())
        gathered: list[tuple[State, bool]] = all_gather((self.state(), settled))
        states = [state for state, _ in gathered]
        if not difference(states) and all(given_up(state) == given_up(states[0]) for state in states):
            self.settled = all(settled for _, settled in gathered)
            return
        for rank, state in enumerate(states):
            for key, (_, failures) in state.items():
                if key in switches:
                    switches[key].follow(failures, rank)
        different = difference([state for state, _ in all_gather((self.state(), False))])
        if different:
            operator = different.partition(" ")[0]
            raise AscendError(
                f"kernels: the ranks compute with different back ends: {different}",
                "install the same packages on every node, or write a back end that all of them have, or "
                f"`off`: `ascend: {{kernels: {{{operator}: ...}}}}`",
            )

    def state(self) -> State:
        return {key: (one.backend, dict(one.failures)) for key, one in self.plan.done.switches.items()}

    def close(self) -> None:
        """Stop counting and disarm what was not reached."""
        if self.attestation is not None:
            self.attestation.stop()
        for switch in self.plan.done.switches.values():
            switch.armed = False
        self.attestation = None


def given_up(state: State) -> dict[tuple[str, str], list[str]]:
    return {key: list(failures) for key, (_, failures) in state.items()}


def difference(states: list[State]) -> str:
    """Return where ranks have different back ends, "" if they have the same.

    Args:
        states: in order of rank; a switch that a rank lacks leaves the operator as it is.
    """
    from llamafactory_ascend.report.document import list_ranks

    found = []
    for operator, place in dict.fromkeys(key for state in states for key in state):
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, state in enumerate(states):
            ranks[state.get((operator, place), (STOCK, {}))[0]].append(rank)
        if len(ranks) > 1:
            named = ", ".join(f"{name} on rank {list_ranks(who)}" for name, who in ranks.items())
            found.append(f"{operator} ({place}): {named}")
    return "; ".join(found)


def judge(counts: dict[str, Any]) -> list[str]:
    """Return what is wrong with the counts of an operator. A tower may be idle: the batch may lack images."""
    problems = []
    bypassed, idle = counts["bypassed"], [name for name in counts["idle"] if in_text(name)]
    if bypassed:
        problems.append(f"{len(bypassed)} modules ran without the kernel put into them, e.g. {bypassed[0]}")
    if idle:
        problems.append(f"{len(idle)} of {counts['modules']} modules were never called, e.g. {idle[0]}")
    return problems


def in_text(name: str) -> bool:
    """True for a module of the language model."""
    return component_of(plain_name(name)) == "text"
