"""Evaluation rows whose question is in a training set: an evaluation that measures memory."""

import hashlib
from dataclasses import dataclass, field

from llamafactory_ascend.checks.data.problem import Limits, Problem, percent, share

Key = bytes


def key_of(question: str) -> Key:
    """Return 8 bytes that stand for a question."""
    return hashlib.blake2b(question.encode("utf-8", "surrogatepass"), digest_size=8).digest()


@dataclass
class Leaks:
    """Questions of the evaluation sets, and the training rows that ask them too; holds the former alone."""

    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.asked: dict[Key, tuple[str, int]] = {}  # question -> the first evaluation row with it
        self.rows = 0
        self.again: dict[Key, int] = {}  # question -> how many evaluation rows have it, where more than one
        self.found: dict[Key, tuple[str, int, str]] = {}  # question -> training set, row, text

    def see_evaluation(self, name: str, number: int, question: str) -> None:
        self.rows += 1
        key = key_of(question)
        if self.asked.setdefault(key, (name, number)) != (name, number):
            self.again[key] = self.again.get(key, 1) + 1

    def see_training(self, name: str, number: int, question: str) -> None:
        key = key_of(question) if self.asked else b""
        if key in self.asked and key not in self.found:
            self.found[key] = (name, number, question)

    def problems(self) -> list[Problem]:
        leaked = sum(self.again.get(key, 1) for key in self.found)
        if not leaked:
            return []
        shown = []
        for key, (name, row, question) in list(self.found.items())[: self.limits.examples]:
            evaluation, number = self.asked[key]
            shown.append(f"{evaluation} row {number} = {name} row {row} ({question.split('|')[0][:24]})")
        over = share(leaked, self.rows) > self.limits.leaked
        message = f"{leaked} of {self.rows} evaluation rows ask what a training row asks: {'; '.join(shown)}"
        limit = (
            f"{percent(leaked, self.rows)} is above `ascend.data.leaked: {self.limits.leaked}`; take them out"
        )
        return [Problem("error" if over else "warning", "leaked", message, limit if over else "")]
