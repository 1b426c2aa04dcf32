"""Keys and values that the host's arguments cannot have. Its parser says which keys it does not know,
and takes any value.

`lora_rank: many` is found by PEFT, after the model has been loaded: "'<=' not supported between instances of
'str' and 'int'", which names no key.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.settings import Settings

KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
SWITCHES = {"true", "false", "yes", "no", "on", "off", "0", "1"}


def refuse(classes: Iterable[Any], args: Mapping[str, Any], where: str) -> None:
    """Compare a recipe's values with the types of the host's dataclasses; text is judged as what it spells.

    Args:
        classes: the dataclasses that will be made from ``args``.
        where: the recipe's name.

    Raises:
        AscendError: a number or a switch is something else.
    """
    hints: dict[str, Any] = {}
    for each in classes:
        hints |= get_type_hints(each)
    found = [
        f"{where}: `{key}` is {value!r}, it must be {wanted}"
        for key, value in args.items()
        if (wanted := misfit(hints.get(key, Any), value))
    ]
    if found:
        raise AscendError("\n".join(found), "nothing has been loaded; correct the recipe and start again")


def training_classes() -> tuple[Any, ...]:
    """Return the dataclasses that a recipe of a training or an export is read into."""
    from llamafactory.hparams import DataArguments, FinetuningArguments, GeneratingArguments, ModelArguments
    from llamafactory.hparams.training_args import TrainingArguments

    return ModelArguments, DataArguments, TrainingArguments, FinetuningArguments, GeneratingArguments


def refuse_unknown(classes: Iterable[Any], keys: Iterable[str], where: str = "") -> None:
    """Refuse keys that a recipe cannot have; stock refuses them too, and does not say which key was meant.

    Args:
        classes: the dataclasses that will be made from the keys.
        where: the recipe's name.

    Raises:
        AscendError: no dataclass has a key; the nearest names are in the message.
    """
    names = {field.name for each in classes for field in dataclasses.fields(each) if field.init}
    found = []
    for key in sorted(set(keys) - names):
        near = [f"ascend.{key}"] if key in Settings.model_fields else difflib.get_close_matches(key, names)
        guess = f": did you mean {' or '.join(f'`{one}`' for one in near)}?" if near else ""
        found.append(f"{where}{': ' if where else ''}the host has no key `{key}`{guess}")
    if found:
        raise AscendError("\n".join(found))


def misfit(hint: Any, value: Any) -> str:
    """Return what a value must be and is not, "" where it fits or the type is none of ``KINDS``."""
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    kinds -= {NoneType}
    if value is None or not kinds or not kinds <= KINDS.keys() or any(fits(kind, value) for kind in kinds):
        return ""
    return " or ".join(KINDS[kind] for kind in KINDS if kind in kinds)


def fits(kind: type, value: Any) -> bool:
    """True where a number or a switch can be read from a value; the host does less with text."""
    if kind is bool:
        return str(value).lower() in SWITCHES
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    return kind is float or number.is_integer()
