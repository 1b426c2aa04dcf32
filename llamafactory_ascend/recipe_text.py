"""A recipe as text: what its header says, and overrides written into it with every comment kept.

A shipped recipe begins with a comment in this form, which ``llamafactory-ascend recipes ls`` reads::

    # What it does, in a sentence.
    #
    # model:  which one
    #         a longer value goes on like this
    # cards:  how many, how large
    #
    # Anything else, for people.
"""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from llamafactory_ascend.errors import AscendError

FIELDS = ("model", "data", "cards", "trains", "memory", "source")  # in this order, each in every recipe


@dataclass(frozen=True)
class Header:
    """What a recipe says about itself.

    Attributes:
        title: the first sentence.
        fields: name -> value on one line, in the recipe's order.
    """

    title: str
    fields: dict[str, str]


def read_header(text: str) -> Header:
    """Read the comment a recipe begins with; parts that are not there are empty."""
    block = re.match(r"(?:#.*\n)*", text)
    lines = [line[1:].removeprefix(" ") for line in (block[0] if block else "").splitlines()]
    paragraphs = [part.split("\n") for part in re.split(r"\n\s*\n", "\n".join(lines))]
    fields: dict[str, str] = {}
    for line in paragraphs[1] if len(paragraphs) > 1 else []:
        found = re.match(r"([a-z]+):\s+(.*)", line)
        if found:
            fields[found[1]] = found[2].strip()
        elif fields:
            last = next(reversed(fields))
            fields[last] = f"{fields[last]} {line.strip()}"
    return Header(" ".join(line.strip() for line in paragraphs[0]).strip(), fields)


@dataclass(frozen=True)
class Change:
    """One override: the dotted key, what the recipe said (None: nothing), and what it says now, as YAML."""

    key: str
    before: str | None
    after: str


def override(text: str, words: Sequence[str]) -> tuple[str, list[Change]]:
    """Write ``key=value`` words into a recipe, as the host would merge them behind it.

    Raises:
        AscendError: a word that is no override, a value that is not YAML, or a key under something that is no
            block of keys.
    """
    changes = []
    for word in words:
        key, given, value = word.partition("=")
        if not given or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
            raise AscendError(f"`{word}` is no override", "write KEY=VALUE, for example cutoff_len=2048")
        text, change = _override_one(text, key, value)
        changes.append(change)
    return text, changes


def _override_one(text: str, key: str, value: str) -> tuple[str, Change]:
    path = key.split(".")
    try:
        new = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise AscendError(
            f"`{key}={value}`: the value is not YAML: {getattr(error, 'problem', error)}",
            f"quote it: '{key}=\"...\"'",
        ) from None
    old = yaml.safe_load(text) or {}
    wanted, before = copy.deepcopy(old), _get(old, path)
    _put(wanted, path, new)
    # As it was typed first: the host reads 1e-4 as a number, PyYAML does not and would quote it.
    for written in (value, json.dumps(new, ensure_ascii=False)):
        changed = _splice(text, path, written)
        try:
            if yaml.safe_load(changed) == wanted:
                return changed, Change(key, before, written)
        except yaml.YAMLError:
            continue
    raise AscendError(
        f"`{key}={value}` cannot be written into the recipe", "copy the recipe and edit it by hand"
    )


def _get(recipe: Any, path: Sequence[str]) -> str | None:
    """Return what a recipe holds at a path, as YAML on one line; None where it holds nothing."""
    for part in path:
        if not isinstance(recipe, dict) or part not in recipe:
            return None
        recipe = recipe[part]
    dumped: str = yaml.safe_dump(recipe, default_flow_style=True, allow_unicode=True, width=10**6)
    return dumped.removesuffix("\n").removesuffix("\n...")


def _put(recipe: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for depth, part in enumerate(path[:-1], 1):
        inner = recipe.setdefault(part, {})
        if not isinstance(inner, dict):
            raise AscendError(
                f"`{'.'.join(path)}` is given, but `{'.'.join(path[:depth])}` is {inner!r}, no block of keys"
            )
        recipe = inner
    recipe[path[-1]] = value


def _splice(text: str, path: Sequence[str], value: str) -> str:
    """Return the text with a value at a path: in place of the old one, or behind the last key beside it."""
    parent: Any = yaml.compose(text, yaml.SafeLoader)
    if parent is None:
        return f"{text}{_block(path, 0, value)}"
    for depth, part in enumerate(path):
        pair = next(((k, v) for k, v in parent.value if k.value == part), None)
        if pair is None:
            break
        name, node = pair
        if depth == len(path) - 1 or not isinstance(node, yaml.MappingNode):
            end = max(
                _end(node), name.end_mark.index + 1
            )  # behind the colon at least, where there is no value
            return f"{text[: name.end_mark.index]}: {value}{text[end:]}"
        parent = node
    else:
        return text
    if parent.flow_style:
        end = parent.end_mark.index - 1
        comma = ", " if parent.value else ""
        nested = "".join(f"{part}: {{" for part in path[depth:-1])
        added = f"{comma}{nested}{path[-1]}: {value}{'}' * len(path[depth:-1])}"
        return f"{text[:end]}{added}{text[end:]}"
    end = _end(parent)
    if "\n" in text[end:]:
        end = text.index("\n", end) + 1  # behind a comment on that line
    elif not text.endswith("\n"):
        text, end = f"{text}\n", len(text) + 1
    column = parent.value[0][0].start_mark.column
    return f"{text[:end]}{_block(path[depth:], column, value)}{text[end:]}"


def _block(path: Sequence[str], column: int, value: str) -> str:
    lines = [f"{' ' * (column + 2 * depth)}{part}:" for depth, part in enumerate(path)]
    return "\n".join(lines) + f" {value}\n"


def _end(node: Any) -> int:
    """Where a node's own text ends: that of a block runs on to the next key, comments included."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        end: int = node.end_mark.index
        return end
    last = node.value[-1]
    return _end(last[1] if isinstance(node, yaml.MappingNode) else last)
