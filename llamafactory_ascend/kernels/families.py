"""The model families as data: which class or function of Transformers holds which operator."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llamafactory_ascend.kernels.operators import OPERATORS

Level = Literal["supported", "experimental", "unsupported"]


@dataclass(frozen=True)
class Place:
    """Where a family keeps an operator.

    Attributes:
        operator: a name of ``operators.OPERATORS``.
        form: a name of ``forms.FORMS``.
        classes: of the modules that call the operator (form of kind `forward`: whose forward it is).
        functions: names in the modeling module that hold it; those that a version lacks are passed by.
        attribute: of the modules, that holds it in versions that bind it per instance.
    """

    operator: str
    form: str
    classes: tuple[str, ...]
    functions: tuple[str, ...] = ()
    attribute: str = ""


@dataclass(frozen=True)
class Support:
    """How far an operator of a family is supported, and why no further."""

    level: Level
    note: str = ""


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: that of its package in Transformers.
        model_types: `model_type` of the configs that belong to it.
        places: of its operators.
        limits: operator -> support, where it is not `supported`.
        layers: classes of decoder layers whose linear attention must be told of packed samples.
    """

    name: str
    model_types: tuple[str, ...]
    places: tuple[Place, ...]
    limits: Mapping[str, Support] = field(default_factory=dict)
    layers: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Return the modeling module's name."""
        return f"transformers.models.{self.name}.modeling_{self.name}"

    @property
    def hybrid(self) -> bool:
        """True where some layers are linear attention."""
        return any(place.operator == "gated_delta_rule" for place in self.places)

    def support(self, operator: str) -> Support:
        """Return how far an operator is supported."""
        if not any(place.operator == operator for place in self.places):
            return Support("unsupported", "the family has no such operator")
        return self.limits.get(operator, Support("supported"))


def _text(prefix: str, norm: str = "rms_norm") -> tuple[Place, ...]:
    return (
        Place(norm, "norm", (f"{prefix}RMSNorm",)),
        Place("rope", "rope", (f"{prefix}Attention",), ("apply_rotary_pos_emb",)),
        Place("swiglu", "mlp", (f"{prefix}MLP",)),
    )


def _vision(prefix: str) -> tuple[Place, ...]:
    return (Place("rope", "rope_vision", (f"{prefix}VisionAttention",), ("apply_rotary_pos_emb_vision",)),)


def _hybrid(prefix: str) -> tuple[Place, ...]:
    return (
        *_text(prefix, "rms_norm_1p"),
        Place("rms_norm_gated", "norm_gated", (f"{prefix}RMSNormGated",)),
        Place(
            "gated_delta_rule",
            "delta_rule",
            (f"{prefix}GatedDeltaNet",),
            ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"),
            "chunk_gated_delta_rule",
        ),
        Place(
            "causal_conv1d",
            "convolution",
            (f"{prefix}GatedDeltaNet",),
            ("causal_conv1d_fn",),
            "causal_conv1d_fn",
        ),
    )


_MODULES_ONLY = "compared module by module; the mixture of experts around it has not been trained on an NPU"
_MOE = {
    "swiglu": Support(
        "experimental", "dense layers and shared experts only; routed experts stay as they are"
    ),
}

FAMILIES: tuple[Family, ...] = (
    Family("qwen2", ("qwen2",), _text("Qwen2")),
    Family(
        "qwen2_5_vl",
        ("qwen2_5_vl", "qwen2_5_vl_text"),
        (
            Place("rms_norm", "norm", ("Qwen2_5_VLRMSNorm",)),
            Place("rope", "rope", ("Qwen2_5_VLAttention",), ("apply_rotary_pos_emb",)),
            Place("rope", "rope_sections", ("Qwen2_5_VLAttention",), ("apply_multimodal_rotary_pos_emb",)),
            Place("swiglu", "mlp", ("Qwen2MLP", "Qwen2_5_VLMLP")),
            *_vision("Qwen2_5_VL"),
        ),
    ),
    Family("qwen3", ("qwen3",), _text("Qwen3")),
    Family("qwen3_moe", ("qwen3_moe",), _text("Qwen3Moe"), _MOE),
    Family(
        "qwen3_vl",
        ("qwen3_vl", "qwen3_vl_text"),
        (*_text("Qwen3VLText"), *_vision("Qwen3VL")),
    ),
    Family(
        "qwen3_5",
        ("qwen3_5", "qwen3_5_text"),
        (*_hybrid("Qwen3_5"), *_vision("Qwen3_5")),
        layers=("Qwen3_5DecoderLayer",),
    ),
    Family(
        "qwen3_5_moe",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        (*_hybrid("Qwen3_5Moe"), *_vision("Qwen3_5Moe")),
        {**_MOE, "gated_delta_rule": Support("experimental", _MODULES_ONLY)},
        layers=("Qwen3_5MoeDecoderLayer",),
    ),
    Family(
        "qwen3_next",
        ("qwen3_next",),
        _hybrid("Qwen3Next"),
        {**_MOE, "gated_delta_rule": Support("experimental", _MODULES_ONLY)},
        layers=("Qwen3NextDecoderLayer",),
    ),
)


def family_of(model_type: str) -> Family | None:
    """Return the family of a config's `model_type`."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def as_markdown() -> str:
    """Return the support table of docs/kernels.md, with its notes."""
    marks = {"supported": "yes", "unsupported": "-"}
    notes: list[str] = []
    rows = []
    for family in FAMILIES:
        cells = [f"`{family.name}`"]
        for operator in OPERATORS:
            support = family.support(operator)
            if support.level == "experimental":
                if support.note not in notes:
                    notes.append(support.note)
                cells.append(f"experimental ({notes.index(support.note) + 1})")
            else:
                cells.append(marks[support.level])
        rows.append("| " + " | ".join(cells) + " |")
    head = "| family | " + " | ".join(f"`{operator}`" for operator in OPERATORS) + " |"
    line = "| --- |" + " --- |" * len(OPERATORS)
    return "\n".join([head, line, *rows, "", *(f"{n}. {note}." for n, note in enumerate(notes, 1)), ""])
