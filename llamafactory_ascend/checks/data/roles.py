"""Messages of `sharegpt` and `openai` rows: who speaks when, and which tags would fit."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llamafactory_ascend.checks.data.problem import Problem
from llamafactory_ascend.checks.data.schema import Layout, kind

ROLE_TAGS = ("role", "from", "speaker")
CONTENT_TAGS = ("content", "value", "text", "message")
NAMES = {  # what roles are called in data sets of all kinds
    "user_tag": ("user", "human", "usr", "prompter", "customer", "question"),
    "assistant_tag": ("assistant", "gpt", "bot", "model", "chatbot", "answer"),
    "observation_tag": ("observation", "tool", "tool_response", "function_response"),
    "function_tag": ("function_call", "function", "tool_call"),
    "system_tag": ("system",),
}


@dataclass(frozen=True)
class Conversation:
    """A row as the host takes it.

    Attributes:
        broken: why the host would stop at it.
        dropped: why the host leaves it out.
        answered: it has an answer, though the row may be left out.
        empty: what it must hold and does not.
        roles: (0 where a question is due, 1 where an answer is; role) of each message but a leading system.
        keys: the keys of its messages.
    """

    broken: str = ""
    dropped: str = ""
    answered: bool = False
    empty: tuple[str, ...] = ()
    roles: tuple[tuple[int, str], ...] = ()
    keys: tuple[str, ...] = ()


def read_messages(row: Mapping[str, Any], layout: Layout) -> Conversation:
    """Read the messages of a row by the host's rules: question and answer in turn, none without the other."""
    key, tags = layout.columns["messages"] or "", layout.tags
    role_tag, content_tag = tags["role_tag"] or "", tags["content_tag"] or ""
    messages = row.get(key)
    if not isinstance(messages, list):
        return Conversation(broken=f"key `{key}`: {kind(messages)} where a list is expected")
    keys = tuple(name for message in messages if isinstance(message, Mapping) for name in message)
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return Conversation(broken=f"key `{key}`: message {place} is {kind(message)}, not an object")
        if role_tag not in keys:
            what = f"key `{key}`: messages have no `{role_tag}`"
            return Conversation(broken=what, roles=_guessed_roles(messages, keys), keys=keys)
    spoken = [_name(message.get(role_tag)) for message in messages]
    texts = [message.get(content_tag) for message in messages]
    if layout.formatting == "openai":
        calls = [message.get("tool_calls") for message in messages]
        answering = (tags["assistant_tag"], tags["function_tag"])
        for place, role in enumerate(spoken):
            if role in answering and calls[place]:  # takes the place of what is said
                spoken[place], texts[place] = tags["function_tag"] or role, calls[place]
    if spoken and tags["system_tag"] and spoken[0] == tags["system_tag"]:
        spoken, texts = spoken[1:], texts[1:]
    if layout.formatting == "openai":
        spoken, texts = _join_observations(spoken, texts, tags)
    roles = tuple((place % 2, role) for place, role in enumerate(spoken))
    questions, answers = (
        (tags["user_tag"], tags["observation_tag"]),
        (tags["assistant_tag"], tags["function_tag"]),
    )
    for place, role in roles:
        if layout.formatting == "openai" and role not in tags.values():
            return Conversation(broken=f"`{role}` is none of the roles in `tags`", roles=roles, keys=keys)
        if role not in (questions, answers)[place]:
            expected = _or((questions, answers)[place])
            turn = "a question" if place == 0 else "an answer"
            return Conversation(
                dropped=f"`{role}` speaks where {turn} ({expected}) is due", roles=roles, keys=keys
            )
    if not layout.ranking and len(roles) % 2:
        return Conversation(dropped="the last question has no answer", roles=roles, keys=keys)
    if layout.ranking and len(roles) % 2 == 0:
        return Conversation(
            dropped="the last message is an answer, which belongs in `chosen`", roles=roles, keys=keys
        )
    if not roles:
        return Conversation(dropped="there are no messages", keys=keys)
    wrong = next(filter(None, map(_wrong_text, [role == tags["function_tag"] for role in spoken], texts)), "")
    if wrong:
        return Conversation(broken=f"key `{key}`: {wrong}", roles=roles, keys=keys)
    return Conversation(answered=bool(texts[-1]), empty=_empty(texts), roles=roles, keys=keys)


def _name(role: Any) -> str:
    return role if isinstance(role, str) else kind(role)


def _wrong_text(calls: bool, text: Any) -> str:
    """Return why the host stops at what a message says: it is no string, or calls no function as it must.

    A call behind a thought, or in a template's own words, is not looked into.
    """
    if calls and isinstance(text, list):
        return ""
    if not isinstance(text, str):
        return f"a message holds {kind(text)} where a string is expected"
    if not calls or text.lstrip().startswith("<"):
        return ""
    try:
        found = json.loads(text)
    except ValueError:
        return f"a call of a function is no JSON: `{text[:40]}`"
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, Mapping) or not {"name", "arguments"} <= set(one):
            return f"a call of a function has no `name` and `arguments`: `{text[:40]}`"
    return ""


def _guessed_roles(messages: list[Any], keys: Iterable[str]) -> tuple[tuple[int, str], ...]:
    tag = next((tag for tag in ROLE_TAGS if tag in keys), "")
    spoken = [message.get(tag) for message in messages if isinstance(message, Mapping)]
    return tuple((place % 2, role) for place, role in enumerate(spoken) if isinstance(role, str))


def _join_observations(
    spoken: list[str], texts: list[Any], tags: Mapping[str, str | None]
) -> tuple[list[str], list[Any]]:
    """Make one of the observations that follow each other; one at the very end is lost, as with the host."""
    roles: list[str] = []
    joined: list[Any] = []
    for role, text in zip(spoken, texts, strict=True):
        if role == tags["observation_tag"] and roles and roles[-1] == role:
            continue
        roles.append(role)
        joined.append(text)
    if roles and roles[-1] == tags["observation_tag"]:
        roles, joined = roles[:-1], joined[:-1]
    return roles, joined


def _empty(texts: list[Any]) -> tuple[str, ...]:
    found = []
    for place, text in enumerate(texts):
        if not str(text).strip():
            what = (
                "an answer is empty: it trains on the end token alone" if place % 2 else "a question is empty"
            )
            found.append(what)
    return tuple(dict.fromkeys(found))


def _or(names: Iterable[str | None]) -> str:
    return " or ".join(f"`{name}`" for name in names if name)


def mismatch(roles: Counter[tuple[int, str]], keys: Counter[str], layout: Layout) -> Problem | None:
    """Say that the tags are not those of the rows, with the `tags` block that fits; None where they are."""
    tags = layout.tags
    found = {role for _, role in roles}
    wrong_keys = bool(keys) and (tags["role_tag"] not in keys or tags["content_tag"] not in keys)
    expected = {tags["user_tag"], tags["assistant_tag"]}
    if not wrong_keys and (found <= set(tags.values()) or expected <= found):
        return None
    fitting = fit(roles, keys)
    if wrong_keys:
        expects = f"`{tags['role_tag']}` and `{tags['content_tag']}`"
        message = f"messages have the keys {_and(keys)}, expected are {expects}"
    else:
        expects = f"`{tags['user_tag']}` and `{tags['assistant_tag']}`"
        message = f"found roles {_and(dict.fromkeys(role for _, role in roles))}, expected {expects}"
    if not fitting or fitting == {name: tag for name, tag in tags.items() if name in fitting}:
        return Problem("error", "tags", message)
    block = json.dumps(fitting, ensure_ascii=False)
    return Problem("error", "tags", message, f'this fits: "tags": {block}')


def fit(roles: Counter[tuple[int, str]], keys: Counter[str]) -> dict[str, str]:
    """Return the `tags` block for messages: by names that are known, else by who speaks first."""
    role = next((tag for tag in ROLE_TAGS if tag in keys), None)
    content = next((tag for tag in CONTENT_TAGS if tag in keys), None)
    if not role or not content:
        return {}
    found: Counter[str] = Counter()
    for (_, name), count in roles.items():
        found[name] += count
    block = {"role_tag": role, "content_tag": content}
    for tag, names in NAMES.items():
        known = [name for name in found if name.lower() in names]
        if known:
            block[tag] = max(known, key=lambda name: found[name])
    for place, tag in enumerate(("user_tag", "assistant_tag")):
        if tag not in block:
            spoken = {
                name: count
                for (at, name), count in roles.items()
                if at == place and name not in block.values()
            }
            if spoken:
                block[tag] = max(spoken, key=lambda name: spoken[name])
    order = (
        "role_tag",
        "content_tag",
        "user_tag",
        "assistant_tag",
        "observation_tag",
        "function_tag",
        "system_tag",
    )
    return {tag: block[tag] for tag in order if tag in block}


def _and(names: Iterable[str]) -> str:
    shown = [f"`{name}`" for name in names]
    return " and ".join(shown) if len(shown) < 3 else f"{', '.join(shown[:-1])} and {shown[-1]}"
