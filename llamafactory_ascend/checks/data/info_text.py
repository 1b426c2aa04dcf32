"""dataset_info.json as text: an entry goes in or out, and every other character stays as it is."""

import json
from typing import Any

from llamafactory_ascend.checks.data.catalogue import SPACE, members


def add(text: str, name: str, keys: Any) -> str:
    """Return the text with an entry behind the last one, indented as the file is.

    Args:
        text: a JSON object, or nothing but white space.

    Raises:
        json.JSONDecodeError: the text is no JSON object.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    if not text.strip():
        return _entry(name, keys, "  ", "\n").join(("{\n", "\n}\n"))
    found = members(text)
    if not found:
        opened = text.index("{") + 1
        closed = text.rindex("}")
        return f"{text[:opened]}{newline}{_entry(name, keys, '  ', newline)}{newline}{text[closed:]}"
    last, before = found[-1], text[: found[-1].start]
    gap = before[len(before.rstrip(SPACE)) :]
    indent = gap.rpartition("\n")[2] if "\n" in gap else None
    if indent is None:  # all in one line
        return f"{text[: last.end]}, {json.dumps(name, ensure_ascii=False)}: {_dumps(keys)}{text[last.end :]}"
    flat = _is_flat(text[last.start : last.end])
    one = (
        f"{indent}{json.dumps(name, ensure_ascii=False)}: {_dumps(keys)}"
        if flat
        else _entry(name, keys, indent, newline)
    )
    return f"{text[: last.end]},{newline}{one}{text[last.end :]}"


def remove(text: str, name: str) -> str:
    """Return the text without the entry of a name, its comma and its line.

    Raises:
        KeyError: there is none.
        json.JSONDecodeError: the text is no JSON object.
    """
    found = members(text)
    place = next((place for place, one in enumerate(found) if one.key == name), None)
    if place is None:
        raise KeyError(name)
    if place:  # from behind the entry before it, its comma included
        return text[: found[place - 1].end] + text[found[place].end :]
    if len(found) > 1:
        return text[: found[0].start] + text[found[1].start :]
    return text[: text.index("{") + 1] + text[text.rindex("}") :]


def _entry(name: str, keys: Any, indent: str, newline: str) -> str:
    text = json.dumps({name: keys}, ensure_ascii=False, indent=indent or None)
    lines = text.split("\n")[1:-1]  # without the braces of the object around it
    return newline.join(lines) if lines else text[1:-1]


def _dumps(keys: Any) -> str:
    return json.dumps(keys, ensure_ascii=False)


def _is_flat(text: str) -> bool:
    """True where a file writes each entry in one line."""
    return "\n" not in text
