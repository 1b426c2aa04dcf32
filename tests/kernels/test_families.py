"""The families as data, held against the installed Transformers and against the docs."""

import importlib
from pathlib import Path

import pytest

from llamafactory_ascend.kernels import families
from llamafactory_ascend.kernels.families import FAMILIES, Family
from llamafactory_ascend.kernels.operators import OPERATORS

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_classes_and_functions_exist(family: Family) -> None:
    """A class that Transformers renames would leave its operator slow without a word."""
    modeling = importlib.import_module(family.module)
    held: dict[tuple[str, tuple[str, ...]], bool] = {}
    for place in family.places:
        for name in (*place.classes, *family.layers):
            assert hasattr(modeling, name), f"{family.module} has no {name}"
        if place.functions:
            key = (place.operator, place.classes)
            held[key] = held.get(key, False) or hasattr(modeling, place.functions[0])
    assert all(held.values()), held
    model_types = {
        config.model_type
        for config in vars(
            importlib.import_module(family.module.replace("modeling", "configuration"))
        ).values()
        if isinstance(getattr(config, "model_type", None), str)
    }
    assert set(family.model_types) <= model_types


@pytest.mark.parametrize(
    "model_type, name", [("qwen3_5_text", "qwen3_5"), ("qwen2", "qwen2"), ("llama", None)]
)
def test_family_of(model_type: str, name: str | None) -> None:
    family = families.family_of(model_type)
    assert (family.name if family else None) == name


def test_support() -> None:
    hybrid, dense = families.family_of("qwen3_5"), families.family_of("qwen3")
    assert hybrid is not None and dense is not None
    assert hybrid.hybrid and not dense.hybrid
    assert hybrid.support("gated_delta_rule").level == "supported"
    assert dense.support("gated_delta_rule").level == "unsupported"
    moe = families.family_of("qwen3_5_moe")
    assert moe is not None and moe.support("gated_delta_rule").level == "experimental"


def test_docs_are_current() -> None:
    """docs/kernels.md holds the generated table, and a line for each operator and back end."""
    text = DOCS.read_text(encoding="utf-8")
    assert families.as_markdown() in text
    for operator in OPERATORS.values():
        assert f"| `{operator.name}` | {operator.what} |" in text
