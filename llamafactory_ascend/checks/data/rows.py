"""Rows one by one, as the host will read them: types, empty questions and answers, what it leaves out."""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamafactory_ascend.checks.data.problem import Limits, Problem, Tally, percent, share
from llamafactory_ascend.checks.data.roles import Conversation, read_messages
from llamafactory_ascend.checks.data.schema import PAIRED, Layout, kind, near

EMPTY_ANSWER = "is empty: the row trains on the end token alone"


@dataclass
class Rows:
    """What the rows of a data set come to; `see` each, then ask for `problems`."""

    layout: Layout
    stage: str
    limits: Limits = field(default_factory=Limits)
    seen: int = 0
    kept: int = 0
    unused: int = 0

    def __post_init__(self) -> None:
        examples = self.limits.examples
        self.dropped, self.empty, self.wrong = Tally(examples), Tally(examples), Tally(examples)
        self.expected = expectations(self.layout)
        self.kinds = dict(self.expected)  # place in a row -> the type it must have, or that it had first
        self.keys: Counter[str] = Counter()
        self.roles: Counter[tuple[int, str]] = (
            Counter()
        )  # (place in turn, 0 or 1; role as written) -> messages
        self.message_keys: Counter[str] = Counter()
        self.labels: Counter[bool] = Counter()
        self.unanswered: int | None = None  # the last row that was dropped and has no answer

    def see(self, number: int, row: Any) -> bool:
        """Take a row in.

        Returns:
            True where the host keeps it and nothing is wrong with its types.
        """
        self.seen += 1
        if not self._is_object(number, row):
            return False
        faults = self._mixed(row) or [*self._history(row), *self._tools(row)]
        for fault in faults:
            self.wrong.add(fault, number)
        if faults:
            return False
        conversation = self._conversation(row)
        if conversation.broken:
            self.wrong.add(conversation.broken, number)
            return False
        reason = conversation.dropped or self._unpaired(row)
        faults = self._preference(row, conversation, bool(reason))
        for fault in faults:
            self.wrong.add(fault, number)
        if faults:
            return False
        if reason:
            self.dropped.add(reason, number)
            if not conversation.answered:
                self.unanswered = number
            return False
        if self.unanswered == number - 1 and self.stage == "kto":  # whose answer the host looks at here too
            self.wrong.add("it is left out, and stage kto stops at the row behind it", number - 1)
        self.kept += 1
        for reason in conversation.empty:
            self.empty.add(reason, number)
        return True

    def pass_by(self, number: int, row: Any) -> None:
        """Take in a row that is read and not used: its types must be those of the others."""
        self.unused += 1
        if self._is_object(number, row):
            for fault in self._mixed(row):
                self.wrong.add(fault, number)

    def _is_object(self, number: int, row: Any) -> bool:
        if not isinstance(row, Mapping):
            self.wrong.add(f"the row is {kind(row)}, it must be an object", number)
            return False
        self.keys.update(row.keys())
        return True

    def _mixed(self, row: Mapping[str, Any]) -> list[str]:
        """Return the places whose type is another than it must be: a table has one type per column."""
        faults = []
        for key, value in row.items():
            for place, found in walk(key, value):
                expected = self.kinds.setdefault(place, found)
                if found != expected:
                    like = "" if place in self.expected else ", as in the rows before"
                    faults.append(f"key `{place}`: {found} where {expected} is expected{like}")
        return list(dict.fromkeys(faults))

    def _history(self, row: Mapping[str, Any]) -> list[str]:
        key = self.layout.columns["history"] or ""
        turns = row.get(key) if self.layout.formatting == "alpaca" else None
        for turn in turns if isinstance(turns, list) else ():
            if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(one, str) for one in turn)):
                return [f"key `{key}`: each turn must be a list of two strings, question and answer"]
        return []

    def _tools(self, row: Mapping[str, Any]) -> list[str]:
        key = self.layout.columns["tools"] or ""
        tools = row.get(key)
        if isinstance(tools, str) and tools:
            try:
                json.loads(tools)
            except ValueError:
                return [f"key `{key}`: tools are no JSON"]
        return []

    def _preference(self, row: Mapping[str, Any], conversation: Conversation, dropped: bool) -> list[str]:
        """Return what the host stops at in the answers of rows with pairs or labels."""
        columns, tags = self.layout.columns, self.layout.tags
        if self.stage == "kto" and self.layout.formatting == "alpaca":
            labelled = isinstance(row.get(columns["kto_tag"] or ""), bool)
            empty = labelled and row.get(columns["response"] or "") is None
            return [f"key `{columns['response']}`: null in a row with a label"] if empty else []
        if self.stage not in PAIRED or self.layout.formatting == "alpaca" or dropped:
            return []
        faults = []
        for key in filter(None, (columns["chosen"], columns["rejected"])):
            answer = row[key]
            role, content = answer.get(tags["role_tag"] or ""), answer.get(tags["content_tag"] or "")
            if role is None or role not in tags.values():
                faults.append(f"key `{key}`: `{role}` is none of the roles in `tags`")
            if not isinstance(content, str):
                faults.append(f"key `{key}`: `{tags['content_tag']}` is {kind(content)}, not a string")
        return faults

    def _conversation(self, row: Mapping[str, Any]) -> Conversation:
        if self.layout.formatting != "alpaca":
            found = read_messages(row, self.layout)
            self.roles.update(found.roles)
            self.message_keys.update(found.keys)
            return found
        columns, empty = self.layout.columns, []
        question = [row.get(columns[name] or "") for name in ("prompt", "query")]
        if not any(isinstance(part, str) and part.strip() for part in question):
            names = " and ".join(f"`{columns[name]}`" for name in ("prompt", "query") if columns[name])
            empty.append(
                f"the question ({names}) is empty" if self.stage != "pt" else f"the text ({names}) is empty"
            )
        if self.stage in PAIRED:
            empty += [
                f"`{columns[name]}` {EMPTY_ANSWER}"
                for name in ("chosen", "rejected")
                if not str(row.get(columns[name] or "") or "").strip()
            ]
        elif self.stage in ("sft", "kto"):
            key = columns["response"] or ""
            answer = row.get(key)
            if not isinstance(answer, str):
                what = f"`{key}` is {'null' if key in row else 'missing'}"
                return Conversation(dropped=what, answered=False)
            if not answer.strip():
                empty.append(f"`{key}` {EMPTY_ANSWER}")
            return Conversation(empty=tuple(empty), answered=bool(answer))
        return Conversation(empty=tuple(empty))

    def _unpaired(self, row: Mapping[str, Any]) -> str:
        """Return why a row has no pair of answers or no label, in the stages that need one."""
        columns = self.layout.columns
        if self.stage in PAIRED:
            expected = str if self.layout.formatting == "alpaca" else Mapping
            for name in ("chosen", "rejected"):
                if not isinstance(row.get(columns[name] or ""), expected):
                    return f"`{columns[name]}` is {kind(row.get(columns[name] or ''))}"
        if self.stage == "kto":
            label = row.get(columns["kto_tag"] or "")
            if not isinstance(label, bool):
                return f"`{columns['kto_tag']}` is {kind(label)}, not true or false"
            self.labels[label] += 1
        return ""

    def problems(self, complete: bool = True) -> list[Problem]:
        """Return what is worth saying about the rows that were seen; ``complete``: there are no others."""
        found = self._missing_keys() if complete else []
        if self.wrong.total:
            found.append(Problem("error", "type", self.wrong.describe()))
        if self.dropped.total:
            found.append(self._dropped())
        if self.empty.total:
            over = share(self.empty.total, self.seen) > self.limits.empty
            amount = f"{self.empty.total} of {self.seen} rows"
            message = f"{amount} are empty where they must not be: {self.empty.describe()}"
            found.append(
                Problem(
                    "error" if over else "warning", "empty", message, self._above("empty") if over else ""
                )
            )
        if len(self.labels) == 1:
            only = str(next(iter(self.labels))).lower()
            message = f"every row has the label `{only}`; KTO learns from both kinds"
            found.append(Problem("warning", "labels", message))
        return found

    def _dropped(self) -> Problem:
        total = self.dropped.total
        over = share(total, self.seen) > self.limits.dropped or not self.kept
        message = (
            f"the host keeps {self.kept} and drops {total} of {self.seen} rows: {self.dropped.describe()}"
        )
        hint = "" if not over else "no row is left" if not self.kept else self._above("dropped")
        return Problem("error" if over else "warning", "dropped", message, hint)

    def _above(self, limit: str) -> str:
        tally = self.dropped if limit == "dropped" else self.empty
        return (
            f"{percent(tally.total, self.seen)} is above `ascend.data.{limit}: "
            f"{getattr(self.limits, limit)}`; repair the rows, or raise it"
        )

    def _missing_keys(self) -> list[Problem]:
        if not self.seen or not self.keys:
            return []
        return [
            Problem(
                "error",
                "missing_key",
                f"no row has the key `{key}` (column `{column}`); the rows have: {', '.join(self.keys)}",
                near(key, self.keys) or f"name the right key in `columns.{column}`, or leave the column out",
            )
            for column, key in self.layout.used.items()
            if key not in self.keys
        ]


def expectations(layout: Layout) -> dict[str, str]:
    """Return key -> the type that the host can do with, of the columns where that is one type.

    Media are looked at elsewhere, and a label decides whether the host keeps the row.
    """
    chat = layout.formatting != "alpaca"
    kinds = dict.fromkeys(("prompt", "query", "response", "system"), "a string")
    kinds |= dict.fromkeys(("messages", "history"), "a list")
    kinds |= dict.fromkeys(("chosen", "rejected"), "an object" if chat else "a string")
    if layout.formatting != "openai":
        kinds["tools"] = "a string"
    return {key: kinds[column] for column, key in layout.used.items() if column in kinds}


def walk(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (place, type) of a value and of what it holds: `messages[].content`; null has no type."""
    if value is None:
        return
    yield place, kind(value)
    if isinstance(value, list):
        for item in value:
            yield from walk(f"{place}[]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk(f"{place}.{key}", item)


def question_of(row: Any, layout: Layout) -> str:
    """Return what a row asks, letters and digits alone, and its media; "" where it asks nothing."""
    if not isinstance(row, Mapping):
        return ""
    columns, tags = layout.columns, layout.tags
    if layout.formatting == "alpaca":
        parts = [row.get(columns[name] or "") for name in ("prompt", "query")]
    else:
        messages = row.get(columns["messages"] or "")
        turns = [one for one in messages if isinstance(one, Mapping)] if isinstance(messages, list) else []
        parts = [
            one.get(tags["content_tag"]) for one in turns if one.get(tags["role_tag"]) == tags["user_tag"]
        ]
    text = normalize("".join(part for part in parts if isinstance(part, str)))
    media = [row.get(columns[name] or "") for name in ("images", "videos", "audios")]
    return f"{text}|{[one for one in media if one]}" if text else ""


def normalize(text: str) -> str:
    """Return a text's letters and digits alone, in one form and case."""
    return "".join(one for one in unicodedata.normalize("NFKC", text).casefold() if one.isalnum())
