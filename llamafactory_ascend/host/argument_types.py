"""Values that the host's arguments cannot have: its parser looks at a recipe's keys, and takes any value.

`lora_rank: many` is found by PEFT, after the model has been loaded: "'<=' not supported between instances of
'str' and 'int'", which names no key.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from llamafactory_ascend.errors import AscendError

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


def refuse_unknown(key: str) -> None:
    """Refuse a key that a recipe cannot have.

    Raises:
        AscendError: no dataclass of a training or an export has it; the nearest names are in the message.
    """
    from llamafactory.hparams import DataArguments, FinetuningArguments, GeneratingArguments, ModelArguments
    from llamafactory.hparams.training_args import TrainingArguments

    classes = (ModelArguments, DataArguments, TrainingArguments, FinetuningArguments, GeneratingArguments)
    names = {field.name for each in classes for field in dataclasses.fields(each) if field.init}
    if key not in names:
        near = difflib.get_close_matches(key, names, n=3)
        guess = f": did you mean {' or '.join(f'`{one}`' for one in near)}?" if near else ""
        raise AscendError(f"the host has no key `{key}`{guess}")


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
