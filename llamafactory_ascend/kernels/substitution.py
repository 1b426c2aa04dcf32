"""Putting back ends in place of a model's own code, reversibly, before or after the model is built.

Everything goes through a `Switch`, which knows the old code and the usable back ends, tries the first one out
when it is first called, and turns to the next where it fails.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.kernels import probe, varlen
from llamafactory_ascend.kernels.backends import Backend
from llamafactory_ascend.kernels.families import Family, Place
from llamafactory_ascend.kernels.forms import FORMS, Form
from llamafactory_ascend.kernels.selection import STOCK, Choice

Call = Callable[..., Any]
_ABSENT = object()


class Switch:
    """Stands where a model's code calls an operator.

    Attributes:
        operator, place: what it computes and the class or function that it stands for.
        original: the old code.
        explicit: the user named the back end, so that nothing else may be used.
        say: called with a sentence for the user, once at most.
        packed: samples share rows, so that the old code would mix them.
        armed: the next call is the first of a training step, which the probe looks at.
        comparison: what the probe found.
        counting: called with the operator at every call, while calls are counted.
        failures: back end -> why it was given up.
    """

    def __init__(
        self, operator: str, place: str, original: Call, form: Form, choice: Choice, say: Call, packed: bool
    ) -> None:
        self.operator, self.place, self.original = operator, place, original
        self.explicit, self.say, self.packed = choice.explicit, say, packed
        self.armed = False
        self.comparison: probe.Comparison | None = None
        self.counting: Callable[[str], None] | None = None
        self.failures: dict[str, str] = {}
        self._form = form
        self._waiting = list(choice.usable)
        self._backend: Backend | None = None
        self._active: Call | None = None
        self._tried = False
        self.__name__ = self.__qualname__ = getattr(original, "__name__", operator)

    @property
    def backend(self) -> str:
        """Return the name of what computes now."""
        if self._backend is not None:
            return self._backend.name
        return self._waiting[0].name if self._waiting else STOCK

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.counting is not None and not torch.compiler.is_compiling():
            self.counting(self.operator)
        if (self.armed or not self._tried) and not torch.compiler.is_compiling():
            self._try(args, kwargs)
        if self._active is None or not self._on_its_device(args, kwargs):
            if self.packed and varlen.current() is not None:
                raise AscendError(
                    f"{self.operator}: packed samples reach code that cannot keep them apart ({self.place})",
                    "set `packing: false` and `neat_packing: false`",
                )
            return self.original(*args, **kwargs)
        return self._active(*args, **kwargs)

    def _on_its_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        assert self._backend is not None
        if not self._backend.devices:
            return True
        tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        return tensor is None or tensor.device.type in self._backend.devices

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the first back end that works on this call and, in a training step, that computes the same."""
        while self._active is not None or self._waiting:
            try:
                if self._active is None:
                    self._backend = self._waiting[0]
                    self._active = self._form.adapt(self._backend.load(), self._backend)
                if not self._on_its_device(args, kwargs):
                    return  # a call from elsewhere: nothing is known yet
                if self.armed:
                    short = self._form.shorten(args, kwargs)
                    with varlen.using(None):
                        self.comparison = probe.compare(
                            self.original, self._active, *short, self._form.constants
                        )
                    if not self.comparison.passed:
                        self._give_up(
                            f"it differs from {self.place} by {self.comparison.worst:.1%} "
                            f"(limit {probe.LIMIT:.0%}): {self.comparison.as_dict()['errors']}"
                        )
                        continue
                elif not self._tried:
                    with torch.no_grad():
                        self._active(*args, **kwargs)
                break
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if isinstance(error, _Refused):
                    raise
                self._give_up(f"its first use failed: {type(error).__name__}: {_first_line(error)}")
        self.armed, self._tried = False, True

    def _give_up(self, reason: str) -> None:
        """Turn to the next back end, with one message for the first that is given up.

        Raises:
            AscendError: the user named this one, or only the old code is left and samples are packed.
        """
        assert self._backend is not None
        name = self._backend.name
        self.failures[name] = reason
        if self._waiting:
            self._waiting.pop(0)
        self._backend = self._active = None
        if self.explicit:
            raise _Refused(
                f"`ascend.kernels`: {self.operator}: {name} cannot be used for {self.place}: {reason}",
                f"write `{self.operator}: auto` or `off` under `ascend.kernels`",
            )
        if not self._waiting and self.packed:
            raise _Refused(
                f"{self.operator}: {name}: {reason}; what is left cannot keep packed samples apart",
                "set `packing: false` and `neat_packing: false`",
            )
        if len(self.failures) == 1:
            self.say(
                f"{self.operator}: {name} is not used for {self.place}: {reason}. {self.backend} computes it"
            )

    def follow(self, failures: Mapping[str, str], rank: int) -> None:
        """Give up, between two steps, what another rank had to give up; the next call probes what follows.

        A kernel that is wrong for the tensors of one rank is not to be trusted by the others, which may have
        passed by the case.
        """
        for name, reason in failures.items():
            if self.backend == name:
                self._backend = self._waiting[0]
                self._give_up(f"on rank {rank} {reason}")
                self.armed, self._tried = bool(self._waiting), not self._waiting

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for the report."""
        found = {
            "operator": self.operator,
            "place": self.place,
            "backend": self.backend,
            "given_up": self.failures,
        }
        return {**found, "probe": self.comparison.as_dict() if self.comparison else None}


class _Refused(AscendError):
    """Ends the search for a back end."""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


@dataclass(frozen=True, eq=False)
class Slot:
    """A module of the model that calls an operator through a switch."""

    name: str
    module: nn.Module
    switch: Switch


@dataclass
class Substitutions:
    """What has been put into a model and its modeling module.

    Attributes:
        switches: (operator, place) -> switch.
        slots: the modules that call them.
        refused: place -> why its code was left alone although a back end was chosen.
        found: operator -> code of others that had been put there before us.
    """

    switches: dict[tuple[str, str], Switch] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)
    _undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute, to be put back by `revert`."""
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def revert(self) -> None:
        """Put back everything, the last first."""
        for owner, name, value in reversed(self._undo):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._undo.clear()
        self.slots.clear()
        self.switches.clear()


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
        if any(slot.module is module and slot.switch.operator == place.operator for slot in done.slots):
            continue
        label = type(module).__name__
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
    stock = next((vars(modeling)[name] for name in place.functions if vars(modeling).get(name)), None)
    if stock is None and not place.attribute:
        return  # this version of the family has no such function
    label = place.functions[0]
    known = done.switches.get((place.operator, label))
    if known is None and stock is not None and form.fits(stock):
        done.refused[label] = form.fits(stock)
        return
    switch = known or _switch(done, order, place, form, label, stock)
    for name in place.functions:
        current = vars(modeling).get(name, _ABSENT)
        if current is not _ABSENT and current is not switch and (current is not None or stock is None):
            done.put(modeling, name, switch)
    holders = {name: module for name, module in named.items() if place.attribute in vars(module)}
    for module in holders.values():
        held = vars(module)[place.attribute]
        if held is not switch:
            if held not in (None, stock, switch.original):
                done.found[place.operator] = (
                    f"{getattr(held, '__module__', '?')}.{getattr(held, '__name__', '?')}"
                )
            done.put(module, place.attribute, switch)
    counted = {id(slot.module) for slot in done.slots if slot.switch is switch}
    for name, module in {**dict(_instances(place, named)), **holders}.items():
        if id(module) not in counted:
            done.slots.append(Slot(name, module, switch))


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
