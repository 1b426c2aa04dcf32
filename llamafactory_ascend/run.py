"""What is known about the run of this process: settings, arguments, patches, decisions, findings, facts."""

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

from llamafactory_ascend import log
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.patching import Ledger
from llamafactory_ascend.settings import Settings


@dataclass
class Arguments:
    """The host's five parsed argument objects, in its order; their attributes keep the host's spelling."""

    model: Any
    data: Any
    training: Any
    finetuning: Any
    generating: Any


@dataclass(frozen=True)
class Finding:
    """Something a check saw: `error` stops the run, `warning` is said, `note` is only reported."""

    level: Literal["note", "warning", "error"]
    subject: str
    message: str


@dataclass(frozen=True)
class Decision:
    """A policy's choice with its reason."""

    subject: str
    choice: str
    reason: str


@dataclass
class Run:
    """The state of the plugin in one process."""

    ledger: Ledger = field(default_factory=Ledger)
    settings: Settings = field(default_factory=Settings)
    arguments: Arguments | None = None
    decisions: dict[str, Decision] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # of this rank, by report section

    def decide(self, subject: str, choice: str, reason: str) -> None:
        """Record a decision; the last one about a subject stands."""
        self.decisions[subject] = Decision(subject, choice, reason)

    def find(self, level: Literal["note", "warning", "error"], subject: str, message: str) -> None:
        """Record a finding and say it unless it is a note."""
        self.findings.append(Finding(level, subject, message))
        if level != "note":
            log.warn(f"{subject}: {message}")

    def miss(self, feature: str, message: str, hint: str = "") -> None:
        """Something promised did not happen: an error where it was asked for, else a loud finding.

        Args:
            feature: the setting that promises it.

        Raises:
            AscendError: `strict: true`, or the recipe names the feature.
        """
        if self.settings.asked_for(feature):
            raise AscendError(message, hint)
        self.find("warning", feature, f"{message} ({hint})" if hint else message)


@functools.cache
def current() -> Run:
    """Return the run of this process."""
    return Run()
