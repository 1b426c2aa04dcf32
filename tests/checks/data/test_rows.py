"""Rows as the host takes them: types, what it drops, what is empty, who speaks when."""

from typing import Any

import pytest

from llamafactory_ascend.checks.data import roles, schema
from llamafactory_ascend.checks.data.problem import Limits, Tally, name_rows
from llamafactory_ascend.checks.data.rows import Rows, question_of

CALL = '{"name": "f", "arguments": {}}'
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
CHAT = schema.layout({"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": TAGS})
OPENAI = schema.layout(
    {
        "formatting": "openai",
        "columns": {"messages": "messages"},
        "tags": {**TAGS, "observation_tag": "tool", "function_tag": "call", "system_tag": "system"},
    }
)
ALPACA = schema.layout({})


def go(layout: schema.Layout, *values: Any, stage: str = "sft", **limits: Any) -> Rows:
    rows = Rows(layout, stage, Limits(**limits))
    for number, value in enumerate(values):
        rows.see(number, value)
    return rows


def said(rows: Rows) -> list[tuple[str, str]]:
    return [(problem.level, problem.message) for problem in rows.problems()]


def pair(output: Any = "a", **more: Any) -> dict[str, Any]:
    return {"instruction": "q", "input": "", "output": output, **more}


def talk(*spoken: str, **contents: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": contents.get(role, role)} for role in spoken]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((pair(), pair(["a"])), "row 1: key `output`: a list where a string is expected"),
        ((pair(["a"]), pair()), "row 0: key `output`: a list where a string is expected"),
        (
            (pair(id=1), pair(id="x")),
            "row 1: key `id`: a string where a number is expected, as in the rows before",
        ),
        (
            (pair(more=["x"]), pair(more=[1])),
            "row 1: key `more[]`: a number where a string is expected, as in the rows before",
        ),
        ((pair(), "text"), "row 1: the row is a string, it must be an object"),
    ],
)
def test_types_that_a_table_cannot_hold(values: tuple[Any, ...], message: str) -> None:
    """Each of them was given to `datasets`, which refuses it without the row."""
    assert said(go(ALPACA, *values)) == [("error", message)]


def test_types_that_a_table_holds() -> None:
    """Numbers of two kinds, null, and keys that not every row has."""
    assert said(go(ALPACA, pair(id=1), pair(id=1.5), pair(id=None), pair(other="x"))) == []


def test_answers_that_are_null_are_dropped_and_empty_ones_trained_on() -> None:
    rows = go(ALPACA, *[pair()] * 8, pair(None), pair("  "), dropped=0.1, empty=0.1)
    assert (rows.seen, rows.kept) == (10, 9)
    assert said(rows) == [
        ("warning", "the host keeps 9 and drops 1 of 10 rows: row 8: `output` is null"),
        (
            "warning",
            "1 of 10 rows are empty where they must not be: row 9: `output` is empty: the row trains on the "
            "end token alone",
        ),
    ]
    assert [level for level, _ in said(go(ALPACA, pair(), pair(None), pair(""), dropped=0.3, empty=0.4))] == [
        "error",
        "warning",
    ]


def test_tools_that_are_no_json() -> None:
    layout = schema.layout({"columns": {**schema.COLUMNS, "tools": "tools"}})
    rows = go(layout, pair(tools="[]"), pair(tools=""), pair(tools="f(x)"))
    assert said(rows)[0] == ("error", "row 2: key `tools`: tools are no JSON")


def test_key_that_no_row_has() -> None:
    rows = go(ALPACA, {"instuction": "q", "input": "", "output": "a"})
    assert rows.problems()[0].sentence() == (
        "no row has the key `instruction` (column `prompt`); the rows have: instuction, input, output; did "
        "you mean `instuction`?"
    )


@pytest.mark.parametrize(
    ("layout", "row", "reason"),
    [
        (CHAT, talk("user", "assistant"), ""),
        (CHAT, talk("user", "assistant", "user", "assistant"), ""),
        (OPENAI, talk("system", "user", "call", "tool", "tool", "assistant", call=CALL), ""),
        (CHAT, talk("assistant", "user"), "`assistant` speaks where a question (`user`) is due"),
        (CHAT, talk("user", "user", "assistant"), "`user` speaks where an answer (`assistant`) is due"),
        (CHAT, talk("user", "assistant", "user"), "the last question has no answer"),
        (CHAT, talk(), "there are no messages"),
        (
            CHAT,
            {"messages": [{"content": "q"}, talk("user")["messages"][0]]},
            "`null` speaks where a question (`user`) is due",
        ),
    ],
)
def test_who_speaks_when(layout: schema.Layout, row: Any, reason: str) -> None:
    assert roles.read_messages(row, layout).dropped == reason


@pytest.mark.parametrize(
    ("layout", "row", "reason"),
    [
        (CHAT, {"messages": None}, "key `messages`: null where a list is expected"),
        (CHAT, {"messages": ["hi"]}, "key `messages`: message 0 is a string, not an object"),
        (
            CHAT,
            talk("user", "assistant", user=None),
            "key `messages`: a message holds null where a string is expected",
        ),
        (OPENAI, talk("user", "bot"), "`bot` is none of the roles in `tags`"),
        (OPENAI, talk("user", "call", call="f()"), "key `messages`: a call of a function is no JSON: `f()`"),
        (
            OPENAI,
            talk("user", "call", call='[{"name": "f"}]'),
            'key `messages`: a call of a function has no `name` and `arguments`: `[{"name": "f"}]`',
        ),
    ],
)
def test_messages_that_stop_the_host(layout: schema.Layout, row: Any, reason: str) -> None:
    assert roles.read_messages(row, layout).broken == reason


@pytest.mark.parametrize(
    ("rows", "block"),
    [
        (
            [{"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}],
            ("from", "human", "gpt"),
        ),
        (
            [{"messages": [{"role": "甲", "content": "q"}, {"role": "乙", "content": "a"}]}],
            ("role", "甲", "乙"),
        ),
    ],
)
def test_tags_that_fit_are_printed(rows: list[Any], block: tuple[str, str, str]) -> None:
    """Roles by their usual names, or by who speaks first."""
    seen = go(CHAT, *rows)
    found = roles.mismatch(seen.roles, seen.message_keys, CHAT)
    assert found is not None
    role, user, assistant = block
    assert f'"role_tag": "{role}"' in found.next
    assert f'"user_tag": "{user}", "assistant_tag": "{assistant}"' in found.next


def test_tags_that_are_right_are_not_blamed_for_the_order() -> None:
    seen = go(CHAT, talk("assistant", "user"))
    assert roles.mismatch(seen.roles, seen.message_keys, CHAT) is None
    seen = go(OPENAI, talk("user", "call", call=CALL))
    assert roles.mismatch(seen.roles, seen.message_keys, OPENAI) is None


def test_preference_rows() -> None:
    layout = schema.layout(
        {"ranking": True, "columns": {"prompt": "q", "chosen": "chosen", "rejected": "rejected"}}
    )
    rows = go(
        layout,
        {"q": "q", "chosen": "a", "rejected": "b"},
        {"q": "q", "chosen": "a", "rejected": None},
        {"q": "q", "chosen": "", "rejected": "b"},
        stage="dpo",
    )
    assert (rows.kept, [*rows.dropped.counts], [*rows.empty.counts]) == (
        2,
        ["`rejected` is null"],
        ["`chosen` is empty: the row trains on the end token alone"],
    )


def test_pair_of_messages_that_stops_the_host() -> None:
    layout = schema.layout(
        {
            "formatting": "sharegpt",
            "ranking": True,
            "columns": {"messages": "messages", "chosen": "chosen", "rejected": "rejected"},
            "tags": TAGS,
        }
    )
    good = {"role": "assistant", "content": "a"}
    rows = go(
        layout,
        {**talk("user"), "chosen": good, "rejected": good},
        {**talk("user"), "chosen": good, "rejected": None},
        {**talk("user"), "chosen": {"role": "bot", "content": "a"}, "rejected": {"role": "assistant"}},
        stage="rm",
    )
    assert (rows.kept, [*rows.dropped.counts]) == (1, ["`rejected` is null"])
    assert [*rows.wrong.counts] == [
        "key `chosen`: `bot` is none of the roles in `tags`",
        "key `rejected`: `content` is null, not a string",
    ]


def test_labelled_row_without_an_answer_stops_the_host() -> None:
    """In the other stages it would be left out; stage kto pairs every row with its neighbour's answer."""
    layout = schema.layout({"columns": {"prompt": "q", "response": "a", "kto_tag": "label"}})
    sound = {"q": "q", "a": "a", "label": False}
    rows = go(layout, {**sound, "a": None}, sound, stage="kto")
    assert said(rows)[0] == ("error", "row 0: key `a`: null in a row with a label")
    rows = go(layout, sound, {"q": "q", "a": None, "label": None}, sound, stage="kto")
    assert said(rows)[0] == ("error", "row 1: it is left out, and stage kto stops at the row behind it")
    rows = go(layout, sound, {"q": "q", "a": "a", "label": None}, sound, stage="kto")
    assert [level for level, _ in said(rows)] == ["error", "warning"], "dropped, and labels of one kind"


def test_labels_of_one_kind() -> None:
    layout = schema.layout({"columns": {"prompt": "q", "response": "a", "kto_tag": "label"}})
    rows = go(
        layout, *[{"q": "q", "a": "a", "label": True}] * 3, {"q": "q", "a": "a", "label": None}, stage="kto"
    )
    assert [*rows.dropped.counts] == ["`label` is null, not true or false"]
    assert rows.problems()[-1].message == "every row has the label `true`; KTO learns from both kinds"


def test_rows_are_counted_and_a_few_named() -> None:
    tally = Tally(examples=2)
    for number in (3, 5, 8, 9):
        tally.add("bad", number)
    assert tally.describe() == "rows 3, 5 and 2 more: bad"
    assert [name_rows([4], 1), name_rows([1, 4], 2)] == ["row 4", "rows 1 and 4"]


def test_question_is_the_same_whatever_its_spaces_and_case() -> None:
    one = question_of({"instruction": "What is Ａ?", "input": " "}, ALPACA)
    assert one == question_of({"instruction": "what  is", "input": "a"}, ALPACA) != ""
    assert question_of({"messages": talk("user", "assistant")["messages"]}, CHAT).startswith("user|")
    assert question_of({"instruction": "?!", "input": ""}, ALPACA) == ""
