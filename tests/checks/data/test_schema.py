"""Entries of dataset_info.json: misspelt keys at every level, columns and tags that name nothing."""

from typing import Any

import pytest

from llamafactory_ascend.checks.data import schema

CHAT: dict[str, Any] = {
    "file_name": "x.json",
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}


def said(entry: Any, stage: str = "sft") -> list[tuple[str, str]]:
    return [(problem.level, problem.sentence()) for problem in schema.problems("x", entry, stage)]


@pytest.mark.parametrize(
    ("entry", "stage"),
    [
        ({"file_name": "x.json"}, "sft"),
        ({"file_name": "x.json", "description": "for people"}, "ppo"),
        (CHAT, "sft"),
        ({"file_name": "x.json", "columns": {"prompt": "text"}}, "pt"),
        ({"hf_hub_url": "a/b", "subset": "c", "split": "train", "num_samples": 3}, "sft"),
        (
            {
                "file_name": "x.json",
                "ranking": True,
                "columns": {"prompt": "q", "chosen": "c", "rejected": "r"},
            },
            "dpo",
        ),
        (
            {"file_name": "x.json", "columns": {"prompt": "q", "response": "a", "kto_tag": "label"}},
            "kto",
        ),
    ],
)
def test_sound_entries(entry: dict[str, Any], stage: str) -> None:
    assert said(entry, stage) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"format": "x"},
            "`x`: unknown key `format`, which the host passes over; did you mean `formatting`?",
        ),
        (
            {"file_nam": "x"},
            "`x`: unknown key `file_nam`, which the host passes over; did you mean `file_name`?",
        ),
        (
            {"columns": {"messages": "m", "image": "images"}},
            "`x.columns`: unknown key `image`, which the host passes over; did you mean `images`?",
        ),
        (
            {"tags": {**CHAT["tags"], "sytem_tag": "system"}},
            "`x.tags`: unknown key `sytem_tag`, which the host passes over; did you mean `system_tag`?",
        ),
        (
            {"formatting": "sharegtp"},
            "`x.formatting` is 'sharegtp', known are alpaca, sharegpt, openai; did you",
        ),
        (
            {"columns": {"tools": "t"}},
            '`x`: `columns` names no `messages`; add `"messages": "conversations"`',
        ),
        ({"columns": ["messages"]}, "`x.columns` is a list, it must be a block of keys"),
        ({"columns": {"messages": 3}}, "`x.columns.messages` is a number, it must be a string"),
        ({"tags": {"role_tag": "role"}}, '`x`: `tags` names no `content_tag`; add `"content_tag": "value"`'),
        ({"file_name": None}, "`x.file_name` is null, it must be a string"),
        ({"ranking": True}, "`x`: stage sft takes no pairs of answers, and `ranking` is true; write"),
    ],
)
def test_mistakes(change: dict[str, Any], sentence: str) -> None:
    entry = {**CHAT, **change}
    for misspelt, right in (("file_nam", "file_name"), ("format", "formatting")):
        if misspelt in change:
            del entry[right]  # one that is there as well is a key of somebody else's
    level, found = said(entry)[0]
    assert level == "error" and found.startswith(sentence)


def test_unknown_key_that_is_near_to_nothing_is_a_warning() -> None:
    assert [level for level, _ in said({**CHAT, "zzz": 1})] == ["warning"]


def test_nothing_to_read() -> None:
    assert said({"formatting": "alpaca"})[0][1].startswith("`x` names no data: one of hf_hub_url")
    assert said("x.json") == [("error", "`x` is a string, it must be a block of keys")]


def test_columns_replace_all_defaults() -> None:
    """As with the host: who names one column has named them all."""
    assert schema.layout({"columns": {"prompt": "text"}}).used == {"prompt": "text"}
    assert schema.layout({}).used == {"prompt": "instruction", "query": "input", "response": "output"}
