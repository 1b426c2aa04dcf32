"""The ``ascend:`` block of a recipe: what it may say, and how it is read from each form a recipe can take."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from llamafactory_ascend.errors import AscendError

KEY = "ascend"


class Settings(BaseModel):
    """Every key has a default: most recipes need no ``ascend:`` block at all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strict: bool = Field(False, description="Turn everything the plugin could not do into an error.")
    checkpointing: Literal["full", "off"] = Field(
        "full",
        description=(
            "`full`: checkpoint every layer that takes part in backward, never re-entrantly; "
            "`off`: leave gradient checkpointing to the host."
        ),
    )
    plugins: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Settings of third-party plugins, by plugin name; passed to them as they are."
    )

    @field_validator("checkpointing", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML 1.1 and OmegaConf read a bare `off` as False

    def asked_for(self, key: str) -> bool:
        """True where a miss must be an error: the user wrote the key, or everything is strict."""
        return self.strict or key in self.model_fields_set


def read(block: Any, where: str) -> Settings:
    """Check an ``ascend:`` block.

    Args:
        block: what the recipe holds under ``ascend`` (None: nothing).
        where: the recipe's name for messages.

    Raises:
        AscendError: an unknown key (with the nearest known one) or a value that cannot be.
    """
    if block is None:
        return Settings()
    if not isinstance(block, Mapping):
        raise AscendError(
            f"{where}: `{KEY}` is {block!r}, it must be a block of keys", f"write `{KEY}: {{strict: true}}`, for example"
        )
    try:
        return Settings.model_validate(dict(block))
    except ValidationError as error:
        raise AscendError("\n".join(_explain(line, where) for line in error.errors())) from None


def _explain(error: Any, where: str) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, Settings.model_fields, n=1)
        known = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(Settings.model_fields)}"
        return f"{where}: unknown key `{KEY}.{key}`: {known}"
    return f"{where}: `{KEY}.{key}` is {error['input']!r}: {error['msg']}"


def take(args: Any) -> tuple[Any, Any]:
    """Split what the host read into its own arguments and our block.

    Args:
        args: a dict (a recipe with its overrides) or a list of command line words.

    Returns:
        The arguments without our block (a new object) and the block, None if there is none.
    """
    if isinstance(args, Mapping):
        rest = {key: value for key, value in args.items() if key != KEY and not str(key).startswith(KEY + ".")}
        block = args.get(KEY)
        dotted = {key: value for key, value in args.items() if str(key).startswith(KEY + ".")}
        for key, value in dotted.items():  # a flat key, as JSON made by a program may hold it
            block = _put(dict(block or {}), key.split(".")[1:], value)
        return rest, block
    if isinstance(args, Sequence) and not isinstance(args, str):
        return _take_words(args)
    return args, None


def _take_words(words: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    rest: list[str] = []
    block: dict[str, Any] = {}
    todo = list(words)
    while todo:
        word = todo.pop(0)
        if not str(word).startswith(f"--{KEY}."):
            rest.append(word)
            continue
        name, given, text = word[2:].partition("=")
        if not given:
            if not todo or todo[0].startswith("--"):
                raise AscendError(f"`{word}` has no value", f"write `{word} VALUE` or `{word}=VALUE`")
            text = todo.pop(0)
        block = _put(block, name.split(".")[1:], yaml.safe_load(text))
    return rest, block or None


def _put(block: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    inner = block.get(path[0])
    return {**block, path[0]: value if len(path) == 1 else _put(dict(inner or {}), path[1:], value)}


def as_overrides(words: Sequence[str]) -> list[str]:
    """Rewrite ``--ascend.x y`` after a recipe as ``ascend.x=y``, the form OmegaConf merges into the recipe."""
    rest, block = _take_words(words)
    return rest + [f"{KEY}.{path}={value}" for path, value in _leaves(block or {})]


def _leaves(block: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in block.items():
        if isinstance(value, Mapping):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", yaml.safe_dump(value, default_flow_style=True).split("\n")[0]))
    return found
