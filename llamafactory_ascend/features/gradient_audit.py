"""Audit of the first gradients: every trainable tensor that got none is named, with a reason if there is one.

An adapter on a module that backward never reaches trains nothing and looks fine in every log.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamafactory_ascend.features.layers import component_of
from llamafactory_ascend.hookspecs import hookimpl

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.run import Arguments, Run

EXAMPLES = 5  # names in the report for each reason; the counts are complete
NAMED = 50  # names in the report of those without a reason
# PEFT starts the second of each pair at zero (LoRA: arXiv 2106.09685, section 4.1), and the gradient of the
# first is a product with it.
ZERO_PARTNERS = {"lora_A": "lora_B", "lora_embedding_B": "lora_embedding_A"}
EXPERT = re.compile(r"^(.*\.experts)\.\d+\.")


@dataclass(frozen=True)
class Gradient:
    """What is known of one trainable tensor after the backward of the first step, over all ranks.

    Attributes:
        name: plain dotted path.
        reached: False where no rank has a gradient tensor at all.
        nonzero: True where an element of it differs from zero (or is not a number) on some rank.
        partner_is_zero: True where the other half of its LoRA pair is still all zero.
    """

    name: str
    reached: bool
    nonzero: bool
    partner_is_zero: bool


def partner_of(name: str) -> str | None:
    """Return the path of the tensor whose being zero makes the gradient of ``name`` zero, if there is one."""
    parts = name.split(".")
    for first, second in ZERO_PARTNERS.items():
        if first in parts:
            return ".".join(second if part == first else part for part in parts)
    return None


def judge(gradients: list[Gradient], media: Mapping[str, bool]) -> dict[str, Any]:
    """Return the report section `gradients`.

    Args:
        media: "vision" and "audio" -> True where a batch of the first step held an image, video or sound that
            some token attends to. The host adds a masked one to batches without, so that no rank waits.

    Returns:
        ``trainable``, a count; ``without_gradient``, reason -> ``tensors``, a count, and ``examples``;
        ``unexplained``, the first names without a reason; ``problems``, a sentence for each kind of these.
    """
    routed = {match[1] for g in gradients if g.nonzero and (match := EXPERT.match(g.name))}
    rewarding = any(g.name.startswith("v_head.") and g.nonzero for g in gradients)
    without = [(g, _excuse(g, media, routed, rewarding)) for g in gradients if not g.nonzero]
    problems = []
    for reached, how in ((False, "backward never reached them"), (True, "all their gradients are zero")):
        names = [g.name for g, excuse in without if not excuse and g.reached is reached]
        if names:
            count = f"{len(names)} of {len(gradients)} trainable tensors learn nothing"
            problems.append(f"{count}: {how} in the first step, e.g. {names[0]}")
    excused: dict[str, list[str]] = {}
    for gradient, excuse in without:
        if excuse:
            excused.setdefault(excuse, []).append(gradient.name)
    return {
        "trainable": len(gradients),
        "without_gradient": {
            excuse: {"tensors": len(names), "examples": names[:EXAMPLES]} for excuse, names in excused.items()
        },
        "unexplained": [g.name for g, excuse in without if not excuse][:NAMED],
        "problems": problems,
    }


def _excuse(gradient: Gradient, media: Mapping[str, bool], routed: set[str], rewarding: bool) -> str:
    name = gradient.name
    if gradient.reached and gradient.partner_is_zero:
        partner = next(second for first, second in ZERO_PARTNERS.items() if first in name.split("."))
        return f"its {partner} is still zero, so its gradient is exactly zero"
    if component_of(name) != "text":
        kind = "audio" if "audio_tower" in name.split(".") else "vision"
        if not media[kind]:
            return f"no {'sound' if kind == 'audio' else 'image or video'} in the first step"
    expert = EXPERT.match(name)
    if expert and expert[1] in routed:
        return "no token of the first step was routed to this expert"
    if rewarding and not gradient.reached and "lm_head" in name.split("."):
        return "a reward is read from the hidden states, the output embedding takes no part in it"
    if name == "v_head.summary.bias":
        return "a pairwise loss is a difference of two values, in which a common bias cancels"
    return ""


def unobservable(arguments: "Arguments") -> str:
    """Return why gradients cannot be seen before the optimizer step, "" if they can."""
    if arguments.training.deepspeed_plugin is not None:  # also where `accelerate launch` brings it
        return "DeepSpeed keeps gradients to itself"
    for method in ("galore", "apollo"):
        if getattr(arguments.finetuning, f"{method}_layerwise", False):
            return f"`{method}_layerwise: true` uses each gradient up during backward"
    return ""


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    run.facts.pop("gradients", None)  # of an earlier training in this process
    reason = unobservable(arguments)
    if reason:
        run.decide("gradient audit", "off", reason)


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    if run.arguments is None or unobservable(run.arguments):
        return []
    from llamafactory_ascend.features.gradient_callback import GradientAudit

    return [GradientAudit(run)]


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `gradients`: the audit of the first optimizer step, the same on every rank; null before it."""
    return {"gradients": run.facts.get("gradients")}
