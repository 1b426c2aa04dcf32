"""Kernels for the NPU: chosen before the model is loaded, put in place when it is built, proven in step 1."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamafactory_ascend import device, log
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.hookspecs import hookimpl
from llamafactory_ascend.kernels import backends, selection
from llamafactory_ascend.kernels.families import Family, family_of
from llamafactory_ascend.kernels.operators import OPERATORS

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer, TrainerCallback

    from llamafactory_ascend.kernels.selection import Choice
    from llamafactory_ascend.kernels.substitution import Substitutions
    from llamafactory_ascend.run import Arguments, Run

FUSED = ("rms_norm", "rms_norm_1p", "rms_norm_gated", "rope", "swiglu")
SEQUENTIAL = tuple(name for name, operator in OPERATORS.items() if operator.sequential)

ROW_NUMBERED = (
    "plain `packing` of a vision-language model numbers each row through, so that its linear attention "
    "would carry every packed sample into the next"
)


@dataclass
class Plan:
    """What this training does about kernels.

    Attributes:
        family: of the model, None if it is not known.
        choices: operator -> choice.
        packed: samples share rows and must be kept apart.
        device_type: of the training.
        done: what has been put in place.
        beside: what has been put into models that only compute (reference and reward models).
        begun: the training has begun; models that are built from now on are not part of it.
        attested: the counted calls of the first step.
    """

    family: Family | None
    choices: "Mapping[str, Choice]"
    packed: bool
    device_type: str
    done: "Substitutions"
    beside: "list[Substitutions]" = field(default_factory=list)
    begun: bool = False
    attested: dict[str, Any] | None = None

    def revert(self) -> None:
        for one in (*self.beside, self.done):
            one.revert()


_plans: list[Plan] = []  # of the training of this process; a list, because a second one replaces the first


def plan() -> Plan | None:
    """Return the plan of the training of this process, None before there is one or if kernels are off."""
    return _plans[0] if _plans else None


def replaces(operator: str) -> bool:
    """True where the plan has a back end for an operator."""
    return bool(_plans) and bool(_plans[0].choices[operator].usable)


def prepare(run: "Run", arguments: "Arguments", model_type: str) -> None:
    """Choose the back ends, once the kind of model is known and before its weights are loaded.

    Raises:
        AscendError: a named back end cannot be used, or packed samples would influence each other.
    """
    if _plans:
        return
    here = device.decide(arguments.training.device.type)
    family = family_of(model_type)
    packed = is_packed(arguments)
    compiled = arguments.training.torch_compile
    conditions = selection.Conditions(here.type, here.name, packed, taken(arguments), compiled)
    wishes = selection.wishes(run.settings.kernels)
    known = [one for found in _known() for one in found]
    choices = {name: selection.select(name, wish, known, family, conditions) for name, wish in wishes.items()}
    if family is not None and family.hybrid and packed:
        judge_packing(run, choices, here.type)
        if not arguments.data.neat_packing and f"{model_type}_text" in family.model_types:
            # Its collator numbers a row by its images, and loses the positions that tell samples apart.
            refuse_packing(run, ROW_NUMBERED, "set `neat_packing: true`", here.type)
    if run.settings.kernels == selection.OFF:
        run.decide("kernels", "left as they are", "`ascend.kernels: off`")
        return
    from llamafactory_ascend.kernels.substitution import Substitutions

    _plans[:] = [Plan(family, choices, packed, here.type, Substitutions())]
    if not any(choice.usable or choice.refused for choice in choices.values()):
        reasons = dict.fromkeys(choice.reason for choice in choices.values())
        run.decide("kernels", "left as they are", "; ".join(reasons))
        return
    assert family is not None  # without one, nothing is usable or refused
    for name, choice in choices.items():
        support = family.support(name)
        if support.level == "unsupported":
            continue
        refused = "".join(f"; {backend}: {reason}" for backend, reason in choice.refused.items())
        run.decide(f"kernels.{name}", choice.name, choice.reason + refused)
        if choice.usable and support.level == "experimental":
            run.find("note", "kernels", f"{name} of {model_type} is experimental: {support.note}")
    _before_build(run)


def _known() -> list[list[backends.Backend]]:
    from llamafactory_ascend import plugins

    found: list[list[backends.Backend]] = plugins.manager().hook.ascend_kernels()
    return found


def is_packed(arguments: "Arguments") -> bool:
    """True where several samples share a row. Pre-training joins its texts by design, without boundaries."""
    data = arguments.data
    return bool(data.neat_packing or (data.packing and arguments.finetuning.stage != "pt"))


def taken(arguments: "Arguments") -> dict[str, str]:
    """Return operator -> who else replaces it in this run."""
    if getattr(arguments.model, "use_v1_kernels", False):
        return dict.fromkeys(FUSED, "left to the host's own kernels (`use_v1_kernels: true`)")
    if arguments.model.enable_liger_kernel:
        return dict.fromkeys(FUSED, "left to Liger (`enable_liger_kernel: true`)")
    return {}


def judge_packing(run: "Run", choices: "Mapping[str, Choice]", device_type: str) -> None:
    """Refuse packing where the linear attention of a hybrid would carry one sample into the next.

    Raises:
        AscendError: it would, on an NPU.
    """
    mixing = [choices[name] for name in SEQUENTIAL if not choices[name].varlen]
    if not mixing:
        return
    reasons = "; ".join(f"{choice.operator}: {choice.reason}" for choice in mixing)
    what = (
        "`packing` or `neat_packing` with this hybrid model would carry the state of the linear attention "
        f"from one packed sample into the next ({reasons})"
    )
    named = ", ".join(f"{name}: pytorch" for name in SEQUENTIAL)
    hint = f"set `packing: false` and `neat_packing: false`, or `ascend: {{kernels: {{{named}}}}}`"
    refuse_packing(run, what, hint, device_type)


def refuse_packing(run: "Run", what: str, hint: str, device_type: str) -> None:
    """Stop a run on an NPU before it trains samples on each other; elsewhere it is as stock, and a warning.

    Raises:
        AscendError: on an NPU.
    """
    if device_type == "npu":
        raise AscendError(what, hint)
    run.find("warning", "kernels", f"{what}; {hint}")


def _before_build(run: "Run") -> None:
    import importlib

    current = _plans[0]
    assert current.family is not None
    modeling = importlib.import_module(current.family.module)
    if current.device_type == "npu" and getattr(modeling, "FusedRMSNormGated", None) is not None:
        # Built with torch.cuda.current_device(), which no NPU has; Transformers' own class is built instead.
        current.done.put(modeling, "FusedRMSNormGated", None)
        run.decide(
            "kernels.gated_norm_class", "Transformers' own", "flash-linear-attention's is made for CUDA"
        )
    _substitute(run, None)


def _substitute(run: "Run", model: "nn.Module | None", done: "Substitutions | None" = None) -> None:
    from llamafactory_ascend.kernels.substitution import Order, substitute

    current = _plans[0]
    if current.family is None or not any(choice.usable for choice in current.choices.values()):
        return

    def say(message: str) -> None:
        if log.rank():  # a finding is printed by rank 0 alone, and this rank's tensors may differ
            log.warn(f"kernels: {message}", every_rank=True)
        run.find("warning", "kernels", message)

    order = Order(current.family, current.choices, current.packed, say)
    substitute(done or current.done, order, model)


def compute_alike(run: "Run", model: "nn.Module") -> None:
    """Let a reference or reward model of this training compute with the operators of the trained model.

    It goes through the same switches, so that what is given up for one is given up for the other, and two
    equal models give equal logits to the last digit. Its calls are not counted.
    """
    current = plan()
    if current is None or current.begun or not current.done.slots:
        return
    beside = current.done.beside()
    current.beside.append(beside)
    _substitute(run, model, beside)
    kind = type(model).__name__
    for place, reason in beside.refused.items():
        run.find("warning", "kernels", f"{place} of a model beside the trained one: {reason}")
    run.decide(
        f"kernels.beside.{len(current.beside)}",
        f"{len(beside.slots)} modules of {kind}",
        "a model beside the trained one computes with the same operators",
    )


@hookimpl
def ascend_kernels() -> list[backends.Backend]:
    return list(backends.BUILT_IN)


@hookimpl
def ascend_arguments(run: "Run", arguments: "Arguments") -> None:
    """Forget an earlier training of this process; choose early where the model lies in a local folder."""
    for earlier in _plans:
        earlier.revert()
    _plans.clear()
    if not arguments.training.do_train:
        return
    config = Path(arguments.model.model_name_or_path) / "config.json"
    if config.is_file():  # elsewhere the host has to fetch the config first
        model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type", "")
        prepare(run, arguments, model_type)


@hookimpl
def ascend_after_model(run: "Run", model: "nn.Module") -> None:
    """Put the back ends into the model."""
    current = plan()
    if current is None:
        return
    _substitute(run, model)
    counts: dict[str, int] = {}
    for slot in current.done.slots:
        counts[slot.switch.operator] = counts.get(slot.switch.operator, 0) + 1
    for operator, code in current.done.found.items():
        run.decide(f"kernels.{operator}.found", "replaced", f"the layers held {code}")
    for place, reason in current.done.refused.items():
        run.find("warning", "kernels", f"{place} keeps Transformers' own code: {reason}")
    kind = type(model).__name__
    missing = [choice for name, choice in current.choices.items() if choice.usable and name not in counts]
    for choice in missing:
        refused = _refused(current, choice.operator)
        if choice.operator in SEQUENTIAL and current.packed and refused:
            what = f"{choice.operator} of {kind} cannot keep packed samples apart: {refused}"
            refuse_packing(run, what, "set `packing: false` and `neat_packing: false`", current.device_type)
        if choice.explicit:
            what = f"`ascend.kernels`: {choice.operator}: {refused or f'no module of {kind} holds it'}"
            raise AscendError(what, f"leave `{choice.operator}` out")
        if counts and not refused:  # most mixtures of experts have no dense layer, for one
            run.find("note", "kernels", f"{choice.operator}: no module of {kind} holds it")
    if missing and not counts:
        reasons = "; ".join(dict.fromkeys(current.done.refused.values()))
        reasons = reasons or f"no module of {kind} is known, although its family is"
        run.miss("kernels", f"nothing was replaced: {reasons}")
    if counts:
        chosen = ", ".join(f"{name} {current.choices[name].name} x{n}" for name, n in counts.items())
        log.info(f"kernels: {chosen}")


def _refused(current: Plan, operator: str) -> str:
    """Return why modules that hold an operator were left alone, "" if none was."""
    places = current.family.places if current.family else ()
    labels = [x for place in places if place.operator == operator for x in (*place.classes, *place.functions)]
    reasons = current.done.refused
    return "; ".join(dict.fromkeys(reasons[label] for label in labels if label in reasons))


@hookimpl
def ascend_trainer_callbacks(run: "Run", trainer: "Trainer") -> "list[TrainerCallback]":
    current = plan()
    if current is None or not current.done.slots:
        return []
    from llamafactory_ascend.features.kernels_proof import KernelsProof

    return [KernelsProof(run, current)]


@hookimpl
def ascend_report_sections(run: "Run") -> dict[str, Any]:
    """Return `kernels`: choices, probes and, after the first step, the counted calls of this rank."""
    current = plan()
    if current is None:
        return {"kernels": None}
    section = {
        "family": current.family.name if current.family else "",
        "packed": current.packed,
        "choices": {name: choice.as_dict() for name, choice in current.choices.items()},
        "switches": [switch.as_dict() for switch in current.done.switches.values()],
        "refused": current.done.refused,
        "attested": current.attested,
    }
    return {"kernels": section}
