"""Question-answer pairs in what a language model says: found, checked, and told apart."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llamafactory_ascend.checks.data.decoding import DECODER
from llamafactory_ascend.checks.data.rows import normalize

QUESTION = (4, 2_000)  # characters, fewest and most
ANSWER = (1, 8_000)
KEYS = {"question", "answer"}
BEGINNINGS = 1_000  # brackets of a reply that are looked at: a model that repeats one for ever is not read on

SYSTEM = (
    "You write training data. From the passage you are given, and from nothing else, you write questions "
    "that somebody who does not see the passage could ask, each with its complete answer, in the language "
    "of the passage."
)
REQUEST = (
    "Write {pairs} question-answer pairs about the passage below. Reply with a JSON array and nothing else: "
    '[{{"question": "...", "answer": "..."}}]\n\nPassage:\n{passage}'
)


@dataclass(frozen=True)
class Pairs:
    """What an answer holds: pairs that are in order, and how many are not, by reason."""

    valid: list[dict[str, str]]
    rejected: dict[str, int]


def messages(passage: str, pairs: int) -> list[dict[str, str]]:
    """Return the conversation that asks for pairs about a passage."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": REQUEST.format(pairs=pairs, passage=passage)},
    ]


def parse(text: str) -> Pairs:
    """Return the pairs of a reply: an array, an object that holds one, or objects one after the other.

    What stands around them (a fence, a sentence, thoughts) is passed over.
    """
    valid: list[dict[str, str]] = []
    rejected: dict[str, int] = {}
    found = list(_objects(re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)))
    for item in found:
        reason = fault(item)
        if reason:
            rejected[reason] = rejected.get(reason, 0) + 1
        else:
            valid.append({key: item[key].strip() for key in ("question", "answer")})
    if not found:
        rejected["no JSON with `question` and `answer`"] = 1
    return Pairs(valid, rejected)


def _objects(text: str) -> Iterator[Any]:
    """Yield what may be a pair, from every JSON value that begins somewhere in the text."""
    at = 0
    for _ in range(BEGINNINGS):
        match = re.compile(r"[\[{]").search(text, at)
        if match is None:
            return
        try:
            value, at = DECODER.raw_decode(text, match.start())
        except json.JSONDecodeError:
            at = match.start() + 1
            continue
        yield from _items(value)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict) and not KEYS & set(value):
        for inner in value.values():
            if isinstance(inner, list):
                yield from inner
    elif isinstance(value, list):
        yield from value
    else:
        yield value


def fault(item: Any) -> str:
    """Return what is wrong with a pair; "" where nothing is."""
    if not isinstance(item, dict):
        return "no object"
    for key, (fewest, most) in (("question", QUESTION), ("answer", ANSWER)):
        text = item.get(key)
        if not isinstance(text, str):
            return f"`{key}` is no text"
        if not text.strip():
            return f"`{key}` is empty"
        if not fewest <= len(text.strip()) <= most:
            return f"`{key}` is not of {fewest} to {most:,} characters"
        if not text.isprintable() and any(
            not one.isprintable() and one not in "\t\n\r" and not one.isspace() for one in text
        ):
            return f"`{key}` holds control codes"
    return ""


def same(question: str) -> str:
    """Return what two questions that are the same have in common: letters and digits, in one case."""
    return normalize(question) or question
