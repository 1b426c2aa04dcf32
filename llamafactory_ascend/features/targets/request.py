"""The ``ascend.targets`` block of a recipe: which modules of which component, in which blocks."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

COMPONENTS = ("text", "projector", "vision")
SETS = ("attention", "mlp", "deltanet", "all")
EVERY_BLOCK = ("all",)
PATH = re.compile(r"[\w-]+(\.[\w-]+)*")
BLOCKS = re.compile(r"(?P<side>first|last):(?P<number>\d+)|(?P<start>\d+)(-(?P<end>\d+))?")


class Group(BaseModel):
    """What to adapt in one component."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    modules: tuple[str, ...] = Field(
        min_length=1,
        description="Ends of module paths in whole parts (`q_proj`, `attn.qkv`), or a set of them.",
    )
    blocks: tuple[str, ...] = Field(
        default=EVERY_BLOCK,
        description="`all`, `last:6`, `first:6`, `8-15`, or a list of these and of numbers.",
    )

    @field_validator("modules", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        names = _listed(value)
        for name in names:
            if not isinstance(name, str | int) or not PATH.fullmatch(str(name)):
                raise ValueError(
                    f"`{name}` is no end of a module path such as `attn.qkv`, nor one of {', '.join(SETS)}"
                )
            if str(name).isdigit():
                raise ValueError(f"a number names no module, write it with its parent: `mlp.{name}`")
        return names

    @field_validator("blocks", mode="before")
    @classmethod
    def _ranges(cls, value: Any) -> Any:
        ranges = tuple(str(part) for part in _listed(value))
        if ranges == EVERY_BLOCK:
            return ranges
        if not ranges:
            raise ValueError("it names no block; leave `blocks` out for all of them")
        for part in ranges:
            found = BLOCKS.fullmatch(part)
            if not found:
                raise ValueError(f"`{part}` is none of `all`, `first:N`, `last:N`, `8-15` or a number")
            if found["number"] and int(found["number"]) == 0:
                raise ValueError(f"`{part}` names no block")
            if found["end"] and int(found["end"]) < int(found["start"]):
                raise ValueError(f"`{part}` runs backwards, write `{found['end']}-{found['start']}`")
        return ranges

    def __str__(self) -> str:
        where = "" if self.blocks == EVERY_BLOCK else f" (blocks {', '.join(self.blocks)})"
        return ", ".join(self.modules) + where


class Targets(BaseModel):
    """The components to adapt; one that is not named stays frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: Group | None = Field(default=None, description="The language model, its output head included.")
    projector: Group | None = Field(default=None, description="What lies between a tower and the text.")
    vision: Group | None = Field(default=None, description="The vision (or audio) tower.")

    @field_validator(*COMPONENTS, mode="before")
    @classmethod
    def _block(cls, value: Any) -> Any:
        if not isinstance(value, Mapping | Group):
            raise ValueError('it must be a block such as `{modules: [q_proj, v_proj], blocks: "last:6"}`')
        return value

    @model_validator(mode="after")
    def _something(self) -> "Targets":
        if not any(True for _ in self.groups()):
            raise ValueError(f"it names no component; known: {', '.join(COMPONENTS)}")
        return self

    def groups(self) -> Iterator[tuple[str, Group]]:
        """Yield (component, group) of each component that is to be adapted."""
        for component in COMPONENTS:
            group = getattr(self, component)
            if group is not None:
                yield component, group

    def __str__(self) -> str:
        return "; ".join(f"{component} {group}" for component, group in self.groups())


def block_numbers(blocks: Sequence[str], count: int) -> tuple[int, ...]:
    """Return the numbers of the blocks meant, ascending.

    Args:
        blocks: of a ``Group``.
        count: how many blocks there are.

    Raises:
        ValueError: a block that does not exist; the message says how many there are.
    """
    if tuple(blocks) == EVERY_BLOCK:
        return tuple(range(count))
    numbers: set[int] = set()
    for part in blocks:
        found = BLOCKS.fullmatch(part)
        assert found is not None
        if found["side"]:
            wanted = int(found["number"])
            last = wanted - 1
            here = range(wanted) if found["side"] == "first" else range(count - wanted, count)
        else:
            last = int(found["end"] or found["start"])
            here = range(int(found["start"]), last + 1)
        if last >= count:
            raise ValueError(f"`{part}` goes beyond the {count} blocks there are, 0 to {count - 1}")
        numbers.update(here)
    return tuple(sorted(numbers))


def _listed(value: Any) -> tuple[Any, ...]:
    """Return a list or the host's comma separated text as a tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list | tuple) else (value,)
