"""What dataset_info.json may say, in the host's spelling, and what an entry comes to with its defaults."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamafactory_ascend.checks.data.problem import Problem

FILE_TYPES = {  # ending -> the reader of the library `datasets`
    "arrow": "arrow",
    "csv": "csv",
    "json": "json",
    "jsonl": "json",
    "parquet": "parquet",
    "txt": "text",
}
SOURCES = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name")
OPTIONS = ("formatting", "ranking", "subset", "split", "folder", "num_samples")
KEYS = (*SOURCES, *OPTIONS, "columns", "tags")
COMMENTS = ("description", "comment", "license", "homepage")  # for people; the host passes over them
COLUMNS = {  # column -> the key of a row it means where `columns` is left out
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": None,
    "messages": "conversations",
    "system": None,
    "tools": None,
    "images": None,
    "videos": None,
    "audios": None,
    "chosen": None,
    "rejected": None,
    "kto_tag": None,
}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
FORMATTINGS = ("alpaca", "sharegpt", "openai")
MEDIA = ("images", "videos", "audios")
PAIRED = ("rm", "dpo")  # stages that need `ranking: true`


@dataclass(frozen=True)
class Layout:
    """How the host reads a row: the key of each column, the tags of messages; None: not there."""

    formatting: str
    ranking: bool
    columns: Mapping[str, str | None]
    tags: Mapping[str, str | None]

    @property
    def used(self) -> dict[str, str]:
        """Return column -> key of what the host looks up in every row."""
        chat = self.formatting != "alpaca"
        passed = {"prompt", "query", "response", "history"} if chat else {"messages"}
        passed |= {"response"} if self.ranking else {"chosen", "rejected"}
        if self.formatting == "openai":
            passed |= {"system", "tools"}  # looked up, and not missed
        return {column: key for column, key in self.columns.items() if key and column not in passed}


def layout(entry: Mapping[str, Any]) -> Layout:
    """Return what an entry of dataset_info.json means; a block that is given replaces all its defaults."""
    columns, tags = entry.get("columns"), entry.get("tags")
    return Layout(
        entry.get("formatting", "alpaca"),
        bool(entry.get("ranking", False)),
        {name: columns.get(name) for name in COLUMNS} if isinstance(columns, Mapping) else COLUMNS,
        {name: tags.get(name) for name in TAGS} if isinstance(tags, Mapping) else TAGS,
    )


def near(name: str, known: Iterable[str], count: int = 1) -> str:
    """Return "did you mean `a`?" for the nearest of the known names, "" where none is near."""
    found = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    return f"did you mean {' or '.join(f'`{one}`' for one in found)}?" if found else ""


def problems(name: str, entry: Any, stage: str) -> list[Problem]:
    """Return what is wrong with an entry of dataset_info.json for a stage of training."""
    if not isinstance(entry, Mapping):
        return [Problem("error", "schema", f"`{name}` is {kind(entry)}, it must be a block of keys")]
    found = unknown_keys(name, entry, KEYS, COMMENTS)
    for block, known in (("columns", COLUMNS), ("tags", TAGS)):
        if block in entry:
            if isinstance(entry[block], Mapping):
                found += unknown_keys(f"{name}.{block}", entry[block], tuple(known))
                found += value_problems(f"{name}.{block}", entry[block])
            else:
                message = f"`{name}.{block}` is {kind(entry[block])}, it must be a block of keys"
                found.append(Problem("error", "schema", message))
    sources = [key for key in SOURCES if key in entry]
    if not sources:
        message = f"`{name}` names no data: one of {', '.join(SOURCES)} is needed"
        found.append(Problem("error", "schema", message, 'write `"file_name": "FILE.json"`'))
    found += [
        Problem("error", "schema", f"`{name}.{key}` is {kind(entry[key])}, it must be a string")
        for key in sources
        if not isinstance(entry[key], str)
    ]
    if entry.get(sources[0] if sources else "", None) == "":
        found.append(Problem("error", "schema", f"`{name}.{sources[0]}` is empty"))
    return found + meaning_problems(name, entry, stage)


def unknown_keys(
    where: str, block: Mapping[str, Any], known: Sequence[str], comments: Sequence[str] = ()
) -> list[Problem]:
    """Return a problem for each key that the host passes over; a misspelt one is an error."""
    found = []
    for key in block:
        if key in known or key in comments:
            continue
        guess = near(str(key), [one for one in known if one not in block])
        message = f"`{where}`: unknown key `{key}`, which the host passes over"
        level, following = ("error", guess) if guess else ("warning", f"known keys: {', '.join(known)}")
        found.append(Problem(level, "schema", message, following))  # type: ignore[arg-type]
    return found


def value_problems(where: str, block: Mapping[str, Any]) -> list[Problem]:
    return [
        Problem("error", "schema", f"`{where}.{key}` is {kind(value)}, it must be a string")
        for key, value in block.items()
        if value is not None and not isinstance(value, str)
    ]


def meaning_problems(name: str, entry: Mapping[str, Any], stage: str) -> list[Problem]:
    """Return what cannot be read with the entry's formatting, columns and tags, or not in this stage."""
    found, read = [], layout(entry)
    if read.formatting not in FORMATTINGS:
        message = f"`{name}.formatting` is {read.formatting!r}, known are {', '.join(FORMATTINGS)}"
        return [Problem("error", "schema", message, near(str(read.formatting), FORMATTINGS))]
    if (stage in PAIRED) != read.ranking:
        say = "needs pairs of answers" if stage in PAIRED else "takes no pairs of answers"
        value = "true" if stage in PAIRED else "false"
        message = f"`{name}`: stage {stage} {say}, and `ranking` is {str(read.ranking).lower()}"
        found.append(Problem("error", "schema", message, f'write `"ranking": {value}`, or take another set'))
    for column in needed(read, stage):
        if not read.columns[column]:
            known = COLUMNS[column] or column
            message = f"`{name}`: `columns` names no `{column}`"
            found.append(
                Problem("error", "schema", message, f'add `"{column}": "{known}"`, the key in your rows')
            )
    if read.formatting != "alpaca":
        for tag in ("role_tag", "content_tag", "user_tag", "assistant_tag"):
            if not read.tags[tag]:
                message = f"`{name}`: `tags` names no `{tag}`"
                found.append(
                    Problem("error", "schema", message, f'add `"{tag}": "{TAGS[tag]}"`, as in your rows')
                )
    return found


def needed(read: Layout, stage: str) -> list[str]:
    """Return the columns without which a stage has nothing to learn from."""
    question = "prompt" if read.formatting == "alpaca" else "messages"
    if stage in PAIRED:
        return [question, "chosen", "rejected"]
    answers = ["response"] if read.formatting == "alpaca" and stage in ("sft", "kto") else []
    return [question, *answers, *(["kto_tag"] if stage == "kto" else [])]


KINDS = {
    type(None): "null",
    bool: "true or false",
    str: "a string",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def kind(value: Any) -> str:
    """Return a value's type in the words of JSON."""
    return KINDS.get(type(value)) or type(value).__name__
