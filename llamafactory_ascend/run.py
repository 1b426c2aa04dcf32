"""What is known about the run of this process: settings, arguments, patches, decisions, findings, facts."""

import functools
import traceback
from collections.abc import Callable
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

    def sentence(self) -> str:
        """Return subject and message, the subject once: "plugin: plugin `x` is off" says it twice."""
        named = self.message.startswith(f"{self.subject} ")
        return self.message if named else f"{self.subject}: {self.message}"


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
    early: list[str] = field(default_factory=list)  # missed before the settings were known
    given: frozenset[str] = frozenset()  # the host's keys that the recipe or the command line names

    def decide(self, subject: str, choice: str, reason: str) -> None:
        """Record a decision; the last one about a subject stands."""
        self.decisions[subject] = Decision(subject, choice, reason)

    def find(self, level: Literal["note", "warning", "error"], subject: str, message: str) -> None:
        """Record a finding and say it unless it is a note; the same one is recorded and said once."""
        finding = Finding(level, subject, message)
        if self.record(finding) and level != "note":
            log.warn(finding.sentence())

    def record(self, finding: Finding) -> bool:
        """Record a finding that something else says, as an error that is raised; False where it is known."""
        known = finding in self.findings
        if not known:
            self.findings.append(finding)
        return not known

    def miss(self, feature: str, message: str, hint: str = "", consequence: str = "") -> None:
        """Something promised did not happen: an error where it was asked for, else a loud finding.

        Args:
            feature: the setting that promises it; `strict` where no setting of its own does.
            consequence: what follows where it is no error; said behind the message.

        Raises:
            AscendError: `strict: true`, or the recipe names the feature.
        """
        if self.settings.asked_for(feature):
            raise AscendError(message, hint)
        if self.arguments is None:
            self.early.append(message)
        self.find(
            "warning",
            "plugin" if feature == "strict" else feature,
            f"{message}{consequence}" + (f" ({hint})" if hint else ""),
        )

    def judge_early_misses(self) -> None:
        """Turn what was missed while the plugins were loaded into an error, now that the settings are known.

        Raises:
            AscendError: `strict: true` and something was missed.
        """
        if self.settings.strict and self.early:
            raise AscendError(
                "\n".join(self.early), "repair it, or leave `ascend.strict` out to go on without it"
            )

    def attempt(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call something the run can do without; an exception becomes a miss that names its place.

        Returns:
            What the function returns, None where it raised.

        Raises:
            AscendError: the function raised one (a deliberate refusal), or `strict: true`.
        """
        try:
            return function(*args, **kwargs)
        except AscendError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.filename}:{frame.lineno}"
            self.miss(
                "strict",
                f"{what} failed: {type(error).__name__}: {error} at {place}",
                consequence="; the run goes on without it",
            )
            return None


@functools.cache
def current() -> Run:
    """Return the run of this process."""
    return Run()
