"""The `ascend:` block: what it may say, and that nothing of the host's is lost on the way."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llamafactory_ascend import settings
from llamafactory_ascend.errors import AscendError

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("block", [None, {}])
def test_defaults(block: Any) -> None:
    found = settings.read(block, "x.yaml")
    assert (found.strict, found.checkpointing, found.plugins) == (False, "full", {})
    assert not found.asked_for("strict")
    assert not found.asked_for("checkpointing")


@pytest.mark.parametrize("off", [False, "off"])
def test_off_as_yaml_reads_it(off: Any) -> None:
    """YAML 1.1 and OmegaConf read a bare `off` as False."""
    assert settings.read({"checkpointing": off}, "x.yaml").checkpointing == "off"


@pytest.mark.parametrize(
    ("given", "expected"), [("48GiB", 48 << 30), ("1.5 GB", 1.5e9), (0.5, 0.5), (1, 1.0)]
)
def test_a_memory_budget_is_a_size_or_a_share(given: Any, expected: float) -> None:
    assert settings.read({"memory_budget": given}, "x.yaml").memory_budget == expected


@pytest.mark.parametrize(
    ("block", "key", "asked"),
    [
        ({"checkpointing": "full"}, "checkpointing", True),
        ({"checkpointing": "off"}, "checkpointing", False),
        ({"strict": True}, "checkpointing", True),
        ({"strict": False}, "strict", False),
        ({"strict": True}, "strict", True),
    ],
)
def test_asked_for(block: dict[str, Any], key: str, asked: bool) -> None:
    assert settings.read(block, "x.yaml").asked_for(key) is asked


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"checkpointng": "full"},
            "x.yaml: unknown key `ascend.checkpointng`: did you mean `checkpointing`?",
        ),
        ({"strikt": True}, "x.yaml: unknown key `ascend.strikt`: did you mean `strict`?"),
        ({"strict": "perhaps"}, "x.yaml: `ascend.strict` is 'perhaps': Input should be a valid boolean"),
        (
            {"checkpointing": "some"},
            "x.yaml: `ascend.checkpointing` is 'some': Input should be 'full', 'auto', 'offload' or 'off'",
        ),
        ({"memory_budget": 48}, "x.yaml: `ascend.memory_budget` is 48: it must be a size with its unit"),
        ({"memory_budget": "0.5"}, "x.yaml: `ascend.memory_budget` is '0.5': it must be a size with"),
        ({"memory_budget": True}, "x.yaml: `ascend.memory_budget` is True: it must be a size with"),
        ({"plugins": {"one": 3}}, "x.yaml: `ascend.plugins.one` is 3: Input should be a valid dictionary"),
        ("on", "x.yaml: `ascend` is 'on', it must be a block of keys"),
        ([{"strict": True}], "x.yaml: `ascend` is [{'strict': True}], it must be a block of keys"),
        ({1: True}, "x.yaml: `ascend.1` is 1: Keys should be strings"),
        ({"kernels": "fla"}, "x.yaml: `ascend.kernels` is 'fla': it must be `auto`, `off` or a"),
        ({"kernels": None}, "x.yaml: `ascend.kernels` is None: it must be `auto`, `off` or a"),
        (
            {"kernels": {"rope": 5}},
            "`ascend.kernels` is {'rope': 5}: the back end of `rope` must",
        ),
    ],
)
def test_mistakes(block: Any, message: str) -> None:
    with pytest.raises(AscendError, match=re.escape(message)):
        settings.read(block, "x.yaml")


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["x.yaml"], "x.yaml"),
        (["x.yaml", "ascend.strict=true", "strikt=1"], "x.yaml"),
        (["x.yaml", "ascend.strikt=1"], "command line"),
        (["x.yaml", "--ascend.strikt", "1"], "command line"),
        (["--ascend.strikt=1"], "command line"),
    ],
)
def test_a_mistake_on_the_command_line_is_not_blamed_on_the_recipe(words: list[str], place: str) -> None:
    with pytest.raises(AscendError, match=f"^{place}: unknown key `ascend.strikt`"):
        settings.read({"strikt": 1}, "x.yaml", words)


def test_unknown_key_without_a_near_one_lists_all() -> None:
    with pytest.raises(AscendError, match="known keys: strict, checkpointing"):
        settings.read({"zzz": 1}, "x.yaml")


def test_two_mistakes_are_both_named() -> None:
    with pytest.raises(AscendError, match=r"(?s)ascend\.checkpointing.*ascend\.strikt"):
        settings.read({"strikt": 1, "checkpointing": 3}, "x.yaml")


@pytest.mark.parametrize(
    ("args", "rest", "block"),
    [
        ({"stage": "sft"}, {"stage": "sft"}, None),
        ({"ascend": None}, {}, None),
        ({"ascend": {"strict": True}, "stage": "sft"}, {"stage": "sft"}, {"strict": True}),
        ({"ascend.strict": True, "ascend_x": 1}, {"ascend_x": 1}, {"strict": True}),
        ({"ascend": {"a": {"b": 1}}, "ascend.a.c": 2}, {}, {"a": {"b": 1, "c": 2}}),
        (["--stage", "sft"], ["--stage", "sft"], None),
        (["--ascend.strict", "true", "--stage", "sft"], ["--stage", "sft"], {"strict": True}),
        (
            ["--ascend.strict=true", "--ascend.plugins.log.every=5"],
            [],
            {"strict": True, "plugins": {"log": {"every": 5}}},
        ),
        (["--ascend.checkpointing", "off"], [], {"checkpointing": False}),
        (["--ascend.plugins.log.name=-5"], [], {"plugins": {"log": {"name": -5}}}),
    ],
)
def test_take(args: Any, rest: Any, block: Any) -> None:
    before = dict(args) if isinstance(args, dict) else list(args)
    assert settings.take(args) == (rest, block)
    assert args == before


@pytest.mark.parametrize("words", [["--ascend.strict"], ["--ascend.strict", "--stage", "sft"]])
def test_word_without_value(words: list[str]) -> None:
    with pytest.raises(AscendError, match=r"(?s)`--ascend.strict` has no value.*--ascend.strict=VALUE"):
        settings.take(words)


def test_a_broken_value_on_the_command_line_is_named() -> None:
    with pytest.raises(
        AscendError, match=r"(?s)`--ascend.plugins.a.b` is `\{a`, which is not YAML.*quote it"
    ):
        settings.take(["--ascend.plugins.a.b", "{a"])


@pytest.mark.parametrize(
    "args", [{"ascend": "on", "ascend.strict": True}, ["--ascend.a=1", "--ascend.a.b=2"]]
)
def test_key_under_a_value(args: Any) -> None:
    with pytest.raises(AscendError, match="no block of keys"):
        settings.take(args)


NAME = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
VALUE = st.one_of(
    st.booleans(), st.integers(-9999, 9999), st.from_regex(r"[a-z]{1,6}( [a-z]{1,3})?", fullmatch=True)
)
BLOCK = st.recursive(
    st.dictionaries(NAME, VALUE, min_size=1, max_size=3),
    lambda inner: st.dictionaries(NAME, inner, min_size=1, max_size=3),
)
HOST = st.dictionaries(NAME.filter(lambda name: name != "ascend"), VALUE, max_size=4)


def leaves(block: dict[str, Any], prefix: str = "ascend") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in block.items():
        found += leaves(value, f"{prefix}.{key}") if isinstance(value, dict) else [(f"{prefix}.{key}", value)]
    return found


@given(HOST, BLOCK, st.data())
def test_every_form_says_the_same(host: dict[str, Any], block: dict[str, Any], data: st.DataObject) -> None:
    """Nested, flat, as words and as overrides: the block arrives whole and the host's arguments untouched."""
    assert settings.take({**host, "ascend": block}) == (host, block)
    assert settings.take({**host, **dict(leaves(block))}) == (host, block)

    ours = [
        [f"--{key}={text}"] if data.draw(st.booleans()) else [f"--{key}", text]
        for key, value in leaves(block)
        for text in [yaml.safe_dump(value).removesuffix("...\n").strip()]
    ]
    theirs = [[f"--{key}", str(value)] for key, value in host.items()]
    mixed = data.draw(st.permutations(ours + theirs))
    words = [word for group in mixed for word in group]
    rest, found = settings.take(words)
    assert found == block
    assert rest == [word for group in mixed if group in theirs for word in group]

    overrides = [f"{key}={value}" for key, value in host.items()]
    after_recipe = [*overrides, *(word for group in ours for word in group)]
    merged = OmegaConf.to_container(OmegaConf.from_cli(settings.as_overrides(after_recipe)))
    assert isinstance(merged, dict)
    assert settings.take(merged)[1] == block
    assert set(settings.take(merged)[0]) == set(host)


def test_documentation_is_made_from_the_descriptions() -> None:
    """Renew: python -c "from llamafactory_ascend import settings as s; print(s.as_markdown(), end='')"."""
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == settings.as_markdown()


def test_every_key_is_described() -> None:
    for name, field in settings.Settings.model_fields.items():
        assert field.description and field.description.endswith("."), name
        assert f"| `ascend.{name}" in settings.as_markdown()
