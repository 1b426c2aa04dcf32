"""What `ascend.targets` may say, and which blocks it means."""

import re
from typing import Any

import pytest
import yaml

from llamafactory_ascend import settings
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.targets.request import Group, block_numbers
from tests.features.targets.families import wish


def blocks(text: str) -> tuple[str, ...]:
    """Read `blocks` as YAML has it, in a block or in braces."""
    group = wish(vision=yaml.safe_load(f"{{modules: attention, blocks: {text}}}")).vision
    assert group is not None
    assert group == wish(vision=yaml.safe_load(f"modules: attention\nblocks: {text}")).vision
    return group.blocks


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("all", list(range(32))),
        ('"last:6"', [26, 27, 28, 29, 30, 31]),
        ("last:6", [26, 27, 28, 29, 30, 31]),
        ("first:3", [0, 1, 2]),
        ("last:32", list(range(32))),
        ("8-11", [8, 9, 10, 11]),
        ("7", [7]),
        ('"1, 4-5"', [1, 4, 5]),
        ('[0, 3, "20-23"]', [0, 3, 20, 21, 22, 23]),
        ('[3, "2-4", "first:1"]', [0, 2, 3, 4]),
    ],
)
def test_blocks(text: str, numbers: list[int]) -> None:
    assert list(block_numbers(blocks(text), 32)) == numbers


@pytest.mark.parametrize("text", ["last:33", "first:33", "30-32", "32", "[0, 32]"])
def test_a_block_beyond_the_last(text: str) -> None:
    with pytest.raises(ValueError, match=r"goes beyond the 32 blocks there are, 0 to 31"):
        block_numbers(blocks(text), 32)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"vison": {"modules": "all"}}, "unknown key `ascend.targets.vison`: did you mean `vision`?"),
        ({"text": {"module": "all"}}, "unknown key `ascend.targets.text.module`: did you mean `modules`?"),
        ({}, "`ascend.targets` is {}: it names no component; known: text, projector, vision"),
        ({"text": "all"}, "`ascend.targets.text` is 'all': it must be a block such as"),
        ({"text": None}, "`ascend.targets.text` is None: it must be a block such as"),
        ({"text": {"modules": []}}, "`ascend.targets.text.modules` is ()"),
        ({"text": {"modules": [0]}}, "a number names no module, write it with its parent: `mlp.0`"),
        ({"text": {"modules": "q_*"}}, "`q_*` is no end of a module path such as `attn.qkv`, nor one of"),
        ({"text": {"modules": ".q_proj"}}, "`.q_proj` is no end of a module path"),
        ({"text": {"modules": "all", "blocks": "last6"}}, "`last6` is none of `all`, `first:N`, `last:N`"),
        ({"text": {"modules": "all", "blocks": "last:0"}}, "`last:0` names no block"),
        ({"text": {"modules": "all", "blocks": "9-3"}}, "`9-3` runs backwards, write `3-9`"),
        ({"text": {"modules": "all", "blocks": []}}, "it names no block; leave `blocks` out"),
        ({"text": {"modules": "all", "blocks": ["all", 3]}}, "`all` is none of"),
    ],
)
def test_mistakes(targets: Any, message: str) -> None:
    with pytest.raises(AscendError, match=re.escape(message)):
        settings.read({"targets": targets}, "x.yaml")


def test_the_words_of_the_command_line() -> None:
    words = ["--ascend.targets.text.modules", "q_proj,v_proj", "--ascend.targets.text.blocks=last:2"]
    found = settings.read(settings.take(words)[1], "command line")
    assert found.targets is not None
    assert found.targets.text == Group(modules=("q_proj", "v_proj"), blocks=("last:2",))
    assert found.asked_for("targets")
    assert not settings.read(None, "x.yaml").asked_for("targets")


def test_it_reads_as_one_line() -> None:
    found = wish(text={"modules": ["q_proj", "v_proj"]}, vision={"modules": "attention", "blocks": "last:6"})
    assert str(found) == "text q_proj, v_proj; vision attention (blocks last:6)"
