"""Putting back ends in place of a model's own code, reversibly, before or after the model is built.

Everything goes through a `Switch`. What is put into a model is remembered by weak references: a model that
its run has let go of is not kept alive.
"""

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from llamafactory_ascend.kernels import varlen
from llamafactory_ascend.kernels.families import Family, Place
from llamafactory_ascend.kernels.forms import FORMS, Form
from llamafactory_ascend.kernels.selection import Choice
from llamafactory_ascend.kernels.switch import Switch

_ABSENT = object()


class Slot:
    """A module of the model that calls an operator through a switch."""

    def __init__(self, name: str, module: nn.Module, switch: Switch) -> None:
        self.name, self.switch = name, switch
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """Return the module.

        Raises:
            ReferenceError: its model is gone.
        """
        module = self.alive()
        if module is None:
            raise ReferenceError(f"{self.name}: its model is gone")
        return module

    def alive(self) -> nn.Module | None:
        """Return the module, None if it is gone, with its model or because another has been put there."""
        return self._module()


@dataclass
class Substitutions:
    """What has been put into a model and its modeling module.

    Attributes:
        switches: (operator, place) -> switch.
        slots: the modules that call them.
        refused: place -> why its code was left alone although a back end was chosen.
        found: operator -> code of others that had been put there before us.
        follows: of a model beside the trained one; it goes through the switches of that one and no others.
    """

    switches: dict[tuple[str, str], Switch] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)
    follows: bool = False
    _undo: list[tuple[weakref.ref[Any], str, Any]] = field(default_factory=list)

    def put(self, owner: nn.Module | ModuleType, name: str, value: Any) -> None:
        """Set an attribute, to be put back by `revert`."""
        self._undo.append((weakref.ref(owner), name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def before(self, owner: Any, name: str) -> Any:
        """Return what an attribute was before `put` set it first."""
        return next(value for reference, key, value in self._undo if reference() is owner and key == name)

    def revert(self) -> None:
        """Put back everything that is still there, the last first."""
        for reference, name, value in reversed(self._undo):
            owner = reference()
            if owner is None:
                continue
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._undo.clear()
        self.slots.clear()
        self.switches.clear()

    def beside(self) -> "Substitutions":
        """Return what is to be put into a model that has to compute as the trained one does."""
        return Substitutions(switches=self.switches, follows=True)


@dataclass(frozen=True)
class Order:
    """What to substitute: family, choice for each operator, whether samples are packed, whom to tell."""

    family: Family
    choices: Mapping[str, Choice]
    packed: bool
    say: Callable[[str], None]


def substitute(done: Substitutions, order: Order, model: nn.Module | None = None) -> None:
    """Put the chosen back ends in place.

    Call it before the model is built with `model=None` (versions that bind the operator in `__init__` bind
    ours then), on a built model, or both; what is there already is not put there twice.
    """
    modeling = importlib.import_module(order.family.module)
    named = dict(model.named_modules()) if model is not None else {}
    for place in order.family.places:
        choice = order.choices[place.operator]
        if not choice.usable:
            continue
        form = FORMS[place.form]
        if form.kind == "forward":
            _replace_forwards(done, order, place, form, named)
        else:
            _replace_functions(done, order, place, form, modeling, named)
    if order.packed:
        for name, module in named.items():
            if type(module).__name__ in order.family.layers:
                _tell_of_samples(done, name, module)


def _instances(place: Place, named: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in named.items():
        if type(module).__name__ in place.classes and type(module).__module__.startswith("transformers."):
            yield name, module


def _switch(done: Substitutions, order: Order, place: Place, form: Form, label: str, old: Any) -> Switch:
    key = (place.operator, label)
    if key not in done.switches:
        choice = order.choices[place.operator]
        done.switches[key] = Switch(
            place.operator, label, form.old(old), form, choice, order.say, order.packed and choice.varlen
        )
    return done.switches[key]


def _replace_forwards(
    done: Substitutions, order: Order, place: Place, form: Form, named: Mapping[str, nn.Module]
) -> None:
    for name, module in _instances(place, named):
        if any(slot.alive() is module and slot.switch.operator == place.operator for slot in done.slots):
            continue
        label = type(module).__name__
        if done.follows and (place.operator, label) not in done.switches:
            continue
        reason = form.fits(module)
        if "forward" in vars(module):
            reason = "its forward has been replaced by somebody else"
        if reason:
            done.refused[label] = reason
            continue
        switch = _switch(done, order, place, form, label, type(module))
        done.put(module, "forward", MethodType(form.install(switch), module))
        done.slots.append(Slot(name, module, switch))


def _replace_functions(
    done: Substitutions,
    order: Order,
    place: Place,
    form: Form,
    modeling: ModuleType,
    named: Mapping[str, nn.Module],
) -> None:
    label = place.functions[0]
    known = done.switches.get((place.operator, label))
    stock = next((vars(modeling)[name] for name in place.functions if vars(modeling).get(name)), None)
    if (stock is None and not place.attribute) or (done.follows and known is None):
        return  # this version of the family has no such function, or the trained model does without
    if known is None and stock is not None and form.fits(stock):
        done.refused[label] = form.fits(stock)
        return
    holders = {name: module for name, module in named.items() if place.attribute in vars(module)}
    callers = {**dict(_instances(place, named)), **holders}
    reason = next(filter(None, map(form.against, callers.values())), "")
    if reason:
        done.refused[label] = reason
        _leave_functions(done, place, known, modeling, holders)
        return
    switch = known or _switch(done, order, place, form, label, stock)
    for name in place.functions:
        current = vars(modeling).get(name, _ABSENT)
        if current is not _ABSENT and current is not switch and (current is not None or stock is None):
            done.put(modeling, name, switch)
    for module in holders.values():
        held = vars(module)[place.attribute]
        if held is not switch:
            if held not in (None, stock, switch.original):
                done.found[place.operator] = (
                    f"{getattr(held, '__module__', '?')}.{getattr(held, '__name__', '?')}"
                )
            done.put(module, place.attribute, switch)
    for name, module in callers.items():
        if not any(slot.switch is switch and slot.alive() is module for slot in done.slots):
            done.slots.append(Slot(name, module, switch))


def _leave_functions(
    done: Substitutions,
    place: Place,
    switch: Switch | None,
    modeling: ModuleType,
    holders: Mapping[str, nn.Module],
) -> None:
    """Take a switch that was put there before the build out of a model that needs its own code.

    A module without the function calls its own submodules, adapters included. Functions that are looked up in
    the modeling module are the same for all models, so that none of them keeps the switch.
    """
    if switch is None:
        return
    for module in holders.values():
        if vars(module)[place.attribute] is switch:
            setattr(module, place.attribute, None)  # not to be put back: it was bound to ours at the build
    if not done.follows:
        for name in place.functions:
            if vars(modeling).get(name) is switch:
                done.put(modeling, name, done.before(modeling, name))
        del done.switches[place.operator, place.functions[0]]


def _tell_of_samples(done: Substitutions, name: str, layer: nn.Module) -> None:
    if isinstance(vars(layer).get("forward"), MethodType):
        return
    inner = type(layer).forward

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows, tokens = hidden_states.shape[:2]
        packed = varlen.of(kwargs.get("position_ids"), kwargs.get("attention_mask"), rows, tokens)
        with varlen.using(packed):
            return inner(self, hidden_states, *args, **kwargs)

    done.put(layer, "forward", MethodType(forward, layer))
