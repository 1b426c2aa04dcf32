"""Choosing a back end for each operator: the first usable one, with the reason of every refusal."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.kernels.backends import Backend
from llamafactory_ascend.kernels.families import Family
from llamafactory_ascend.kernels.operators import OPERATORS

AUTO, OFF = "auto", "off"
STOCK = "transformers"  # the name of leaving an operator as it is
COMPILED = "`torch_compile: true` traces the model, where a back end can be neither probed nor counted"
HINT = "name another back end, or `auto`, or `off`"


@dataclass(frozen=True)
class Conditions:
    """What a back end has to cope with.

    Attributes:
        device_type: of the training: "npu", "cuda", "cpu".
        device_name: what the driver calls it, e.g. "Ascend910B3".
        packed: True where several samples lie in one row and must not influence each other.
        taken: operator -> who else replaces it in this run (the host's own kernels, for one).
        compiled: the model is compiled, so that it is traced past what tries and counts the calls.
    """

    device_type: str
    device_name: str
    packed: bool = False
    taken: Mapping[str, str] | None = None
    compiled: bool = False


@dataclass(frozen=True)
class Choice:
    """What was chosen for an operator.

    Attributes:
        usable: the back ends that can be used, the chosen one first; empty: the operator stays as it is.
        explicit: the user named the back end.
        reason: why.
        refused: back end -> why not.
    """

    operator: str
    usable: tuple[Backend, ...]
    explicit: bool
    reason: str
    refused: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.usable[0].name if self.usable else STOCK

    @property
    def varlen(self) -> bool:
        """True where what was chosen keeps packed samples apart."""
        return bool(self.usable) and self.usable[0].varlen

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for the report."""
        return {"backend": self.name, "reason": self.reason, "refused": dict(self.refused)}


def wishes(setting: str | Mapping[str, str]) -> dict[str, str]:
    """Return operator -> wish of `ascend.kernels`: `auto`, `off` or the name of a back end."""
    if isinstance(setting, str):
        return dict.fromkeys(OPERATORS, setting)
    return {operator: setting.get(operator, AUTO) for operator in OPERATORS}


def select(
    operator: str, wish: str, backends: Iterable[Backend], family: Family | None, conditions: Conditions
) -> Choice:
    """Choose a back end.

    Args:
        wish: `auto`, `off` or a name.
        backends: all that are known; those of other operators are passed by.
        family: of the model, None for one that is not known.

    Raises:
        AscendError: the named back end cannot be used.
    """
    known = sorted((one for one in backends if one.operator == operator), key=lambda one: one.order)
    if wish in (OFF, STOCK):
        return Choice(operator, (), False, f"`kernels: {{{operator}: {wish}}}`", {})
    explicit = wish != AUTO
    if explicit and wish not in {one.name for one in known}:
        names = [one.name for one in known]
        near = difflib.get_close_matches(wish, names, n=1)
        raise AscendError(
            f"`ascend.kernels`: {operator} has no back end `{wish}`",
            f"did you mean `{near[0]}`?" if near else f"known: {', '.join([AUTO, OFF, *names])}",
        )
    against = _against_all(operator, family, conditions, explicit)
    if against:
        if explicit:
            hint = "set `torch_compile: false`" if against == COMPILED else "name no back end for it"
            raise AscendError(f"`ascend.kernels`: {operator}: {wish}: {against}", hint)
        return Choice(operator, (), False, against, {})
    usable, refused = [], {}
    for one in known:
        if explicit and one.name != wish:
            continue
        reason = refusal(one, conditions)
        if reason:
            refused[one.name] = reason
        else:
            usable.append(one)
    if explicit and not usable:
        raise AscendError(f"`ascend.kernels`: {operator}: {wish} cannot be used: {refused[wish]}", HINT)
    if explicit:
        return Choice(operator, tuple(usable), True, f"`kernels: {{{operator}: {wish}}}`", {})
    reason = "the first usable" if usable else "no back end can be used"
    return Choice(operator, tuple(usable), False, reason, refused)


def _against_all(operator: str, family: Family | None, conditions: Conditions, explicit: bool) -> str:
    """Return why no back end at all is to be used, "" if nothing speaks against it."""
    if conditions.device_type != "npu" and not explicit:
        return f"`auto` replaces nothing on a {conditions.device_type.upper()}"
    if family is None:
        return "the model is of no family that is known"
    support = family.support(operator)
    if support.level == "unsupported":
        return f"{family.name}: {support.note}"
    if conditions.compiled:
        return COMPILED
    return (conditions.taken or {}).get(operator, "")


def refusal(backend: Backend, conditions: Conditions) -> str:
    """Return why a back end cannot be used, "" if it can; its own requirements are asked last."""
    if backend.devices and conditions.device_type not in backend.devices:
        return f"it runs on {' or '.join(backend.devices)}, this is {conditions.device_type}"
    if backend.socs and not conditions.device_name.startswith(backend.socs):
        return f"it runs on {', '.join(backend.socs)}, this is {conditions.device_name}"
    if not backend.backward:
        return "it has no backward"
    if conditions.packed and OPERATORS[backend.operator].sequential and not backend.varlen:
        return "it cannot keep packed samples apart"
    for requirement in backend.requires:
        reason = requirement()
        if reason:
            return reason
    return ""
