"""Proof of the kernels: probed and counted in the first step of a training on this rank."""

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback

from llamafactory_ascend import log
from llamafactory_ascend.features.layers import component_of, plain_name
from llamafactory_ascend.kernels.attestation import Attestation

if TYPE_CHECKING:
    from llamafactory_ascend.features.kernels import Plan
    from llamafactory_ascend.run import Run


class KernelsProof(TrainerCallback):  # type: ignore[misc]
    """Arms the probes and counts the calls of the first step that ends, once per training."""

    def __init__(self, run: "Run", plan: "Plan") -> None:
        self.run, self.plan = run, plan
        self.attestation: Attestation | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()  # of a begin that never came to the end of a step
        self.plan.attested = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self.attestation is None and self.plan.attested is None:
            for switch in self.plan.done.switches.values():
                switch.armed = switch.comparison is None
            self.attestation = Attestation(self.plan.done.slots)
            self.attestation.start()

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if self.attestation is None:
            return
        found = self.attestation.result()
        self.close()
        self.agree()
        self.plan.attested = found
        for operator, counts in found.items():
            for problem in judge(counts):
                if log.rank():  # a finding is printed by rank 0 alone
                    log.warn(f"kernels: {operator}: {problem}", every_rank=True)
                self.run.miss("kernels", f"{operator}: {problem}")

    def agree(self) -> None:
        """Let every rank give up what one had to give up: all go on with the same back ends."""
        from llamafactory_ascend.report.gathering import all_gather

        switches = self.plan.done.switches
        for rank, failures in enumerate(all_gather({key: one.failures for key, one in switches.items()})):
            for key, theirs in failures.items():
                if key in switches:
                    switches[key].follow(theirs, rank)

    def close(self) -> None:
        """Stop counting and disarm what was not reached."""
        if self.attestation is not None:
            self.attestation.stop()
        for switch in self.plan.done.switches.values():
            switch.armed = False
        self.attestation = None


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
