"""The ``ascend:`` block of a recipe: what it may say, and how it is read from each form a recipe can take."""

import difflib
import re
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.targets.request import Targets
from llamafactory_ascend.kernels.operators import OPERATORS

KEY = "ascend"


class Oft(BaseModel):
    """The block ``ascend.oft``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    exact_cayley: bool = Field(
        default=True,
        description=(
            "`true`: a new OFT adapter has exact rotations (`use_cayley_neumann: false` in its "
            "adapter_config.json), computed once a step for all layers; `false`: PEFT's series."
        ),
    )
    any_version: bool = Field(
        default=False,
        description=(
            "Load an OFT adapter although its adapter_config.json is of another PEFT version or does not say "
            "how it rotates; otherwise that is refused, because the same weights compute something else then."
        ),
    )


class Data(BaseModel):
    """The block ``ascend.data``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dropped: float = Field(
        default=0.1, ge=0, le=1, description="Share of rows that the host drops above which a run is refused."
    )
    empty: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of rows with an empty question or answer above which it is refused.",
    )
    leaked: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of evaluation rows that a training row asks too above which it is refused.",
    )
    lost: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of answer tokens that `cutoff_len` cuts off above which `data check` fails.",
    )
    seconds: float = Field(
        default=20,
        ge=0,
        description="How long the rows of all data sets are looked at before a run; 0: not at all.",
    )


class Settings(BaseModel):
    """Every key has a default: most recipes need no ``ascend:`` block at all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strict: bool = Field(default=False, description="Turn everything the plugin could not do into an error.")
    checkpointing: Literal["full", "auto", "offload", "off"] = Field(
        default="full",
        description=(
            "`full`: checkpoint every layer that takes part in backward, never re-entrantly; `auto`: all but "
            "as many of the last ones as fit into `memory_budget`; `offload`: every one, its input in host "
            "memory until backward; `off`: leave gradient checkpointing to the host; see "
            "docs/checkpointing.md."
        ),
    )
    memory_budget: float | ByteSize = Field(
        default=0.9,
        description=(
            "With `checkpointing: auto`, what a step may allocate on a device: a size (`48GiB`), or a share "
            "of what other processes leave of the device's memory."
        ),
    )
    kernels: Literal["auto", "off"] | dict[str, str] = Field(
        default="auto",
        description=(
            "`auto`: on an NPU, the first usable back end for each operator, compared with the old code in "
            "the first step; `off`: leave every one to Transformers and the host; or operator: back end "
            "pairs, `auto` or `off`; see docs/kernels.md."
        ),
    )
    oft: Oft = Field(
        default_factory=Oft, description="How OFT adapters are made and loaded; see docs/oft.md."
    )
    targets: Targets | None = Field(
        default=None,
        description=(
            "LoRA and OFT: exactly the modules to adapt, by component (`text`, `projector`, `vision`), each "
            "`{modules: [...], blocks: ...}`; instead of `lora_target` and `oft_target`; see docs/targets.md."
        ),
    )
    device: Literal["auto", "npu", "any"] = Field(
        default="auto",
        description=(
            "`auto`: where torch_npu is installed, an NPU or what the recipe names (`use_cpu`), never a "
            "CPU for "
            "lack of an NPU; elsewhere any device; `npu`: an NPU or no run; `any`: whatever the host finds."
        ),
    )
    allow: list[Literal["bitsandbytes"]] = Field(
        default_factory=list,
        description=(
            "What is refused on NPUs unless it is named here. `bitsandbytes`: 4 and 8 bit weights, whose "
            "loss "
            "is abnormal."
        ),
    )
    dataset_info: list[str] = Field(
        default_factory=list,
        description=(
            "More dataset_info.json files (or their folders) whose data sets the recipe can name; files in "
            "them are relative to their own folder."
        ),
    )
    data: Data = Field(default_factory=Data, description="Checks of the data sets; see docs/data.md.")
    loss: Literal["auto", "chunked", "off"] = Field(
        default="auto",
        description=(
            "`chunked`: compute the loss over the supervised positions alone, chunk by chunk, so that the "
            "logits of all positions never exist; `auto`: do so on an NPU, unless `kernels: off`; "
            "`off`: never."
        ),
    )
    stress: bool = Field(
        default=False,
        description=(
            "`true`: before the first step, take one at the full size that the recipe allows, evaluate a "
            "batch of that size, and put everything back; what does not fit is refused; see docs/running.md."
        ),
    )
    plugins: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Settings of third-party plugins, by plugin name; passed to them as they are.",
    )

    @field_validator("checkpointing", "loss", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML 1.1 and OmegaConf read a bare `off` as False

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _share_or_size(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
            return float(value)
        size = re.fullmatch(r"\d+(\.\d+)? ?[KMGT]i?B", value) if isinstance(value, str) else None
        if size is None:
            raise ValueError("it must be a size with its unit, as in `48GiB`, or a share up to 1")
        return value

    @field_validator("kernels", mode="before")
    @classmethod
    def _known_operators(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            value = "off" if value is False else value
            if value not in ("auto", "off"):
                raise ValueError("it must be `auto`, `off` or a block of operator: back end")
            return value
        for name, wish in value.items():
            if not isinstance(wish, str) and wish is not False:
                raise ValueError(f"the back end of `{name}` must be a name, `auto` or `off`")
            if name not in OPERATORS:
                near = difflib.get_close_matches(str(name), OPERATORS, n=1)
                known = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(OPERATORS)}"
                raise ValueError(f"there is no operator `{name}`; {known}")
        return {name: "off" if wish is False else wish for name, wish in value.items()}

    def asked_for(self, key: str) -> bool:
        """True where a miss must be an error: all is strict, or the user wrote the key, and not off."""
        return self.strict or (key in self.model_fields_set and getattr(self, key) not in ("off", False))


def read(block: Any, where: str, words: Sequence[str] = ()) -> Settings:
    """Check an ``ascend:`` block.

    Args:
        block: what the recipe holds under ``ascend`` (None: nothing).
        where: the recipe's name for messages.
        words: the command line; a mistake that was made there is not blamed on the recipe.

    Raises:
        AscendError: an unknown key (with the nearest known one) or a value that cannot be.
    """
    if block is None:
        return Settings()
    if not isinstance(block, Mapping):
        raise AscendError(
            f"{where}: `{KEY}` is {block!r}, it must be a block of keys",
            f"write `{KEY}: {{strict: true}}`, for example",
        )
    try:
        return Settings.model_validate(dict(block))
    except ValidationError as error:
        raise AscendError("\n".join(_explain(line, where, words) for line in error.errors())) from None


def place(key: str, where: str, words: Sequence[str]) -> str:
    """Return where a dotted key comes from: the command line, if it or a part of it stands there."""
    given = [str(word).removeprefix("--").partition("=")[0] for word in words]
    ours = [name for name in given if name.startswith(f"{KEY}.")]
    found = any(f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.") for name in ours)
    return "command line" if found else where


def _explain(error: Any, where: str, words: Sequence[str]) -> str:
    path = [str(part) for part in error["loc"]]
    key = ".".join([KEY, *path])
    where = place(key, where, words)
    if error["type"] == "extra_forbidden":
        known = _keys_beside(path)
        near = difflib.get_close_matches(path[-1], known, n=1)
        return f"{where}: unknown key `{key}`: " + (
            f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(known)}"
        )
    return f"{where}: `{key}` is {error['input']!r}: {error['msg'].removeprefix('Value error, ')}"


def _keys_beside(path: Sequence[str]) -> list[str]:
    """Return the keys that are allowed where the last one of ``path`` is not, however deep it lies."""
    model: Any = Settings
    for part in path[:-1]:
        annotation = model.model_fields[part].annotation
        inner = [
            kind
            for kind in (annotation, *get_args(annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not inner:
            break
        model = inner[0]
    return list(model.model_fields)


def take(args: Any) -> tuple[Any, Any]:
    """Split what the host read into its own arguments and our block.

    Args:
        args: a dict (a recipe with its overrides) or a list of command line words.

    Returns:
        The arguments without our block (a new object) and the block, None if there is none.

    Raises:
        AscendError: a word without a value or with a broken one, or a key under something that is no block.
    """
    if isinstance(args, Mapping):
        ours = [key for key in args if key == KEY or str(key).startswith(f"{KEY}.")]
        rest = {key: value for key, value in args.items() if key not in ours}
        block = args.get(KEY)
        for key in ours:
            if key != KEY:  # a flat key, as JSON made by a program may hold it
                block = _put(block, key.split("."), 1, args[key])
        return rest, block
    if isinstance(args, Sequence) and not isinstance(args, str):
        words, pairs = _take_words(args)
        block = None
        for name, text in pairs:
            block = _put(block, name.split("."), 1, _value(name, text))
        return words, block
    return args, None


def _value(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        what = f"`--{name}` is `{text}`, which is not YAML: {getattr(error, 'problem', error)}"
        raise AscendError(what, f"quote it: --{name} '\"...\"'") from None


def as_overrides(words: Sequence[str]) -> list[str]:
    """Rewrite ``--ascend.x y`` after a recipe as ``ascend.x=y``, the form OmegaConf merges into the recipe.

    Raises:
        AscendError: a word without a value.
    """
    rest, pairs = _take_words(words)
    return rest + [f"{name}={text}" for name, text in pairs]


def _take_words(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split command line words into the host's and ours, as (dotted name, text of the value)."""
    rest: list[str] = []
    pairs: list[tuple[str, str]] = []
    todo = iter(words)
    for word in todo:
        if not str(word).startswith(f"--{KEY}."):
            rest.append(word)
            continue
        name, given, text = word[2:].partition("=")
        value = text if given else next(todo, None)
        if value is None or (not given and value.startswith("--")):
            raise AscendError(f"`{word}` has no value", f"write `{word} VALUE` or `{word}=VALUE`")
        pairs.append((name, value))
    return rest, pairs


def _put(block: Any, path: Sequence[str], depth: int, value: Any) -> dict[str, Any]:
    """Return the block with ``value`` at ``path[depth:]``."""
    if block is not None and not isinstance(block, Mapping):
        raise AscendError(
            f"`{'.'.join(path)}` is given, but `{'.'.join(path[:depth])}` is {block!r}, no block of keys",
            "remove one of the two",
        )
    block = dict(block or {})
    if depth == len(path) - 1:
        return {**block, path[depth]: value}
    return {**block, path[depth]: _put(block.get(path[depth]), path, depth + 1, value)}


def as_markdown() -> str:
    """Return docs/settings.md: every key with its values, default and description."""
    rows = "\n".join(_row(f"{KEY}.{name}", field) for name, field in Settings.model_fields.items())
    return HEAD + rows + "\n"


def _row(name: str, field: FieldInfo) -> str:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "\n".join(_row(f"{name}.{inner}", value) for inner, value in annotation.model_fields.items())
    default = field.get_default(call_default_factory=True)
    if not isinstance(default, str):
        default = yaml.safe_dump(default, default_flow_style=True).split("\n")[0]
    cells = [f"`{name}`", f"`{_kind(annotation)}`", f"`{default}`", field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(_kind(part) for part in get_args(annotation) if part is not NoneType)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"block of {', '.join(annotation.model_fields)}"
    return str(annotation).replace("typing.", "") if get_args(annotation) else annotation.__name__


HEAD = """# Settings

One block `ascend:` in a recipe. Every key has a default, so most recipes need none.

```yaml
ascend:
  strict: true
  checkpointing: full
```

A key can also be given on the command line: `--ascend.strict true` or `--ascend.strict=true`, and behind a
recipe `ascend.strict=true`. JSON recipes work too, and so does a flat key `"ascend.strict": true`. An unknown
key, or a value that cannot be, ends the command with exit code 2 before anything is loaded.

A key that is written is a request: where the plugin cannot do what it says, the run stops. Where it is left
to its default, the run goes on as stock with a warning, unless `strict` is set.

This page is made from the descriptions in `llamafactory_ascend/settings.py`.

| key | values | default | meaning |
| --- | --- | --- | --- |
"""
