"""The choice of back ends: order, refusals with reasons, explicit names, devices."""

from dataclasses import replace

import pytest

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.kernels.backends import BUILT_IN, Backend
from llamafactory_ascend.kernels.families import family_of
from llamafactory_ascend.kernels.operators import OPERATORS
from llamafactory_ascend.kernels.selection import Choice, Conditions, select, wishes

NPU = Conditions("npu", "Ascend910B3")
CPU = Conditions("cpu", "CPU")
HYBRID = family_of("qwen3_5_text")
RULE = "gated_delta_rule"


def choose(
    wish: str = "auto", conditions: Conditions = NPU, model_type: str = "qwen3_5", **extra: object
) -> Choice:
    operator = str(extra.pop("operator", RULE))
    known = [*BUILT_IN, *extra.pop("more", [])]  # type: ignore[misc]
    return select(operator, wish, known, family_of(model_type), conditions)


def test_auto_takes_the_first_usable_and_says_why_not_the_others() -> None:
    choice = choose()
    assert choice.name == "pytorch" and choice.varlen
    assert list(choice.refused) == ["fla"]
    assert "flash-linear-attention is not installed" in choice.refused["fla"]


def test_order() -> None:
    """A third party's comes first by default; what is left is there to fall back on."""
    ours = Backend("theirs", RULE, "math:sqrt")
    assert [one.name for one in choose(more=[ours]).usable] == ["theirs", "pytorch"]
    assert [one.name for one in choose(more=[replace(ours, order=99)]).usable] == ["pytorch", "theirs"]


@pytest.mark.parametrize(
    "change, conditions, reason",
    [
        ({"devices": ("npu",)}, replace(NPU, device_type="cuda"), "it runs on npu, this is cuda"),
        ({"socs": ("Ascend910B",)}, replace(NPU, device_name="Ascend310P"), "it runs on Ascend910B"),
        ({"backward": False}, NPU, "it has no backward"),
        ({"varlen": False}, replace(NPU, packed=True), "it cannot keep packed samples apart"),
        ({"requires": (lambda: "no driver",)}, NPU, "no driver"),
    ],
)
def test_refusals(change: dict[str, object], conditions: Conditions, reason: str) -> None:
    """What speaks against a back end is in the choice, and an error where it was named."""
    theirs = replace(Backend("theirs", RULE, "math:sqrt", varlen=True), **change)  # type: ignore[arg-type]
    if conditions.device_type == "npu":
        assert reason in choose(conditions=conditions, more=[theirs]).refused["theirs"]
    with pytest.raises(AscendError, match=f"theirs cannot be used: {reason}"):
        choose("theirs", conditions, more=[theirs])


def test_off_an_npu_only_what_is_named() -> None:
    for operator in OPERATORS:
        assert choose(conditions=CPU, operator=operator).name == "transformers"
    named = choose("pytorch", CPU)
    assert (named.name, named.explicit) == ("pytorch", True)


def test_off() -> None:
    for wish in ("off", "transformers"):
        assert choose(wish).usable == ()


def test_unknown_name() -> None:
    with pytest.raises(AscendError, match="did you mean `pytorch`"):
        choose("pytroch")


def test_families() -> None:
    """No family, an operator that the family lacks, and one that somebody else replaces."""
    assert choose(model_type="llama").reason == "the model is of no family that is known"
    assert choose(model_type="qwen3").reason == "qwen3: the family has no such operator"
    with pytest.raises(AscendError, match="no such operator"):
        choose("pytorch", model_type="qwen3")
    taken = replace(NPU, taken={"rope": "left to somebody"})
    assert choose(conditions=taken, operator="rope").reason == "left to somebody"
    with pytest.raises(AscendError, match="left to somebody"):
        choose("torch_npu", taken, operator="rope")


def test_wishes() -> None:
    assert set(wishes("auto").values()) == {"auto"}
    assert wishes({"rope": "off"}) == {**dict.fromkeys(OPERATORS, "auto"), "rope": "off"}
