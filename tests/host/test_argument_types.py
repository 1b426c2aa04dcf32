"""An unknown key, or a value of a wrong type, is refused before anything is loaded."""

from dataclasses import dataclass
from typing import Any

import pytest

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.host.argument_types import misfit, refuse, refuse_unknown, training_classes


@pytest.mark.parametrize(
    ("hint", "value", "wanted"),
    [
        (int, "many", "a whole number"),
        (int, 8.5, "a whole number"),
        (int | None, [8], "a whole number"),
        (float, "fast", "a number"),
        (int | float, {}, "a whole number or a number"),
        (bool, "perhaps", "true or false"),
        (bool | None, ["true"], "true or false"),
    ],
)
def test_what_cannot_be_is_named(hint: Any, value: Any, wanted: str) -> None:
    assert misfit(hint, value) == wanted


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, 8),
        (int, 1e3),
        (int, "8"),
        (int | None, None),
        (float, "1e-4"),
        (float, 3),
        (float, float("inf")),
        (bool, 0),
        (bool, "False"),
        (bool | str, "auto"),
        (str, ["a"]),
        (dict | str | None, 3),
        (Any, object()),
    ],
)
def test_what_can_be_is_left_to_the_host(hint: Any, value: Any) -> None:
    assert misfit(hint, value) == ""


@dataclass
class Model:
    name: str = ""
    rope_factor: float = 1.0


@dataclass
class Finetuning:
    lora_rank: int = 8


def test_every_mistake_is_named_with_its_recipe() -> None:
    refuse([Model, Finetuning], {"lora_rank": 8, "other": "x"}, "a.yaml")
    with pytest.raises(AscendError) as error:
        refuse([Model, Finetuning], {"lora_rank": "many", "rope_factor": "x", "name": 3}, "a.yaml")
    assert error.value.what == (
        "a.yaml: `lora_rank` is 'many', it must be a whole number\n"
        "a.yaml: `rope_factor` is 'x', it must be a number"
    )


def test_unknown_keys_are_named_with_the_nearest_ones() -> None:
    keys = ["learning_rat", "checkpointing", "stage", "zzz"]
    with pytest.raises(AscendError) as caught:
        refuse_unknown(training_classes(), keys, "x.yaml")
    first, second, third = str(caught.value).splitlines()
    assert first == "x.yaml: the host has no key `checkpointing`: did you mean `ascend.checkpointing`?"
    assert second.startswith("x.yaml: the host has no key `learning_rat`: did you mean `learning_rate`")
    assert third == "x.yaml: the host has no key `zzz`"
