"""Settings beside the targets: refused where they contradict, said where they do nothing."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.features.targets.conflicts import idle_flags, refuse
from llamafactory_ascend.run import Arguments


def arguments(unsloth: bool = False, **changes: Any) -> Arguments:
    from llamafactory.hparams import FinetuningArguments

    finetuning = FinetuningArguments(**{"finetuning_type": "lora", **changes})
    return Arguments(SimpleNamespace(use_unsloth=unsloth), None, None, finetuning, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finetuning_type": "full"}, "`finetuning_type: full` trains the model's own weights"),
        ({"finetuning_type": "freeze"}, "`finetuning_type: freeze` trains the model's own weights"),
        (
            {"finetuning_type": "full", "use_galore": True},
            "`use_galore: true` trains the model's own weights",
        ),
        ({"finetuning_type": "full", "use_badam": True}, "`use_badam: true` trains the model's own weights"),
        ({"use_llama_pro": True}, "`use_llama_pro: true` chooses the expanded blocks itself"),
        ({"unsloth": True}, "Unsloth places its adapters itself"),
        ({"lora_target": "q_proj,v_proj"}, "`lora_target: q_proj,v_proj` and `ascend.targets` both choose"),
        ({"lora_target": "all"}, "`lora_target: all` and `ascend.targets` both choose"),
        ({"finetuning_type": "oft", "oft_target": "qkv"}, "next: remove `oft_target` (or remove `ascend.ta"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AscendError, match=re.escape(message)):
        refuse(arguments(**changes), set(changes))


@pytest.mark.parametrize("kind", ["lora", "oft"])
def test_defaults_contradict_nothing(kind: str) -> None:
    """`lora_target: all` and `freeze_vision_tower: true` are the host's defaults."""
    found = arguments(finetuning_type=kind)
    refuse(found, {"finetuning_type"})
    assert list(idle_flags(found.finetuning, {"finetuning_type"}, {"vision"}, "ascend.targets")) == []


@pytest.mark.parametrize(
    "kind", [{"use_dora": True}, {"use_rslora": True}, {"pissa_init": True}, {"lora_rank": 64}]
)
def test_kinds_of_lora_are_untouched(kind: dict[str, Any]) -> None:
    refuse(arguments(**kind), set(kind))


WINS = "is trained, ascend.targets names modules of it and wins"


@pytest.mark.parametrize(
    ("flags", "trained", "exact", "said"),
    [
        (
            {"freeze_vision_tower": True},
            "vision",
            True,
            f"`freeze_vision_tower: true` has no effect: vision {WINS}",
        ),
        (
            {"freeze_language_model": True},
            "text",
            True,
            f"`freeze_language_model: true` has no effect: text {WINS}",
        ),
        (
            {"freeze_vision_tower": False},
            "text",
            True,
            "`freeze_vision_tower: false` trains nothing: ascend.targets reaches no module of vision",
        ),
        (
            {"freeze_language_model": False},
            "vision",
            False,
            "`freeze_language_model: false` trains nothing: lora_target reaches no module of text",
        ),
        ({"freeze_vision_tower": False, "freeze_language_model": True}, "vision", True, ""),
        ({"freeze_vision_tower": True, "freeze_language_model": False}, "text", False, ""),
        (
            {"freeze_trainable_layers": 3},
            "text",
            False,
            "`freeze_trainable_layers` has no effect with `finetuning_type: lora`",
        ),
        (
            {"freeze_trainable_modules": "mlp"},
            "text",
            True,
            "`freeze_trainable_modules` has no effect with `finetuning_type: lora`",
        ),
        ({"freeze_trainable_layers": 2, "use_llama_pro": True}, "text", False, ""),
    ],
)
def test_flags_that_do_nothing(flags: dict[str, Any], trained: str, exact: bool, said: str) -> None:
    origin = "ascend.targets" if exact else "lora_target"
    found = list(idle_flags(arguments(**flags).finetuning, set(flags), {trained}, origin))
    assert found == ([said] if said else [])
