"""A patch is data: what is replaced, why, until when, and what became of it.

The ledger applies patches to modules that are already imported, checks them, counts their use and takes them
back. One patch that fails never stops another. The run report, ``doctor`` and the table in the docs are all
made from these records, so they cannot drift from what was done.
"""

import functools
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from llamafactory_ascend.errors import AscendError

ANYTHING = "..."  # last name of a contract that does not care what follows


class State(StrEnum):
    """Where a patch stands. ``hit`` means its replacement has really been called in this process."""

    PLANNED = "planned"
    APPLIED = "applied"
    VERIFIED = "verified"
    HIT = "hit"
    SKIPPED = "skipped"
    FAILED = "failed"
    REVERTED = "reverted"


class Source(StrEnum):
    """What is known about the source of a target, from its fingerprint."""

    NEEDED = "still needed"
    FIXED = "fixed upstream"
    CHANGED = "changed, untested"


@dataclass(frozen=True)
class Target:
    """A function or method of the host: ``module`` and the dotted ``name`` inside it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class Patch:
    """A replacement of one host function.

    Attributes:
        id: short name, unique in the ledger.
        targets: where the function may live, in order of preference; the first module that defines it counts.
        around: called as ``around(original, *args, **kwargs)`` in the original's place.
        parameters: the parameter names ``around`` relies on (ANYTHING last: more may follow); other names
            mean another contract, and a refusal.
        why: what stock does.
        remove_when: the upstream change that makes the patch needless.
        upstream: link to the bug or change, if there is one.
        tested: fingerprint of the source -> host version it was tested with.
        fixed: fingerprint of a source that no longer needs the patch -> the version that has it.
        feature: the setting that asks for it; where the user wrote that setting, a miss is an error.
        optional: some tested versions of the host do not have the function; there is nothing to miss in them.
    """

    id: str
    targets: tuple[Target, ...]
    around: Callable[..., Any]
    parameters: tuple[str, ...]
    why: str
    remove_when: str
    upstream: str = ""
    tested: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    feature: str = "strict"
    optional: bool = False


@dataclass
class Record:
    """What became of one patch in this process."""

    patch: Patch
    state: State = State.PLANNED
    reason: str = ""
    target: Target | None = None
    fingerprint: str = ""
    source: Source | None = None
    hits: int = 0
    original: Any = None  # as the class or module holds it, staticmethod and classmethod objects included
    replacement: Any = None
    places: list[tuple[Any, str]] = field(default_factory=list)
    inherited: bool = False  # the class did not define the method itself

    def as_dict(self) -> dict[str, Any]:
        """Return the plain data of the record, for JSON."""
        return {
            "id": self.patch.id,
            "state": str(self.state),
            "reason": self.reason,
            "target": str(self.target or self.patch.targets[0]),
            "source": str(self.source) if self.source else "",
            "fingerprint": self.fingerprint,
            "hits": self.hits,
            "why": self.patch.why,
            "remove_when": self.patch.remove_when,
            "upstream": self.patch.upstream,
        }


class Ledger:
    """The patches of one process, in the order they were added."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.lock = threading.RLock()  # modules become complete in whichever thread imports them

    def add(self, patch: Patch) -> Record:
        """Plan a patch.

        Raises:
            AscendError: the id is taken.
        """
        with self.lock:
            if patch.id in self.records:
                raise AscendError(f"two patches are called `{patch.id}`", "give the second another id")
            record = self.records[patch.id] = Record(patch)
            return record

    def module_ready(self, module: str) -> None:
        """Apply every planned patch that has a target in ``module``, which is completely imported."""
        with self.lock:
            for record in self.records.values():
                if record.state is State.PLANNED and any(t.module == module for t in record.patch.targets):
                    apply(record, module)

    def verify(self) -> None:
        """Check that each applied patch still stands: it, or what wraps it, is where it was put."""
        with self.lock:
            for record in self.standing():
                outer = current(record)
                if not any(layer is record.replacement for layer in layers(outer, self.replacements())):
                    record.state = State.FAILED
                    record.reason = f"replaced after it was applied, by {describe(outer)}"
                elif record.state is State.APPLIED:
                    record.state = State.VERIFIED

    def revert(self) -> None:
        """Put every original back, the last patch first.

        What somebody else has put over a replacement stays; the replacement below it only passes calls on.
        """
        with self.lock:
            for record in reversed(list(self.standing())):
                for owner, leaf in reversed(record.places):
                    if inspect.getattr_static(owner, leaf, None) is record.replacement:
                        if record.inherited:
                            delattr(owner, leaf)
                        else:
                            setattr(owner, leaf, record.original)
                    else:
                        outer = inspect.getattr_static(owner, leaf, None)
                        record.reason = f"inert, and left in place under {describe(outer)}"
                record.places.clear()
                record.state = State.REVERTED

    def standing(self) -> list[Record]:
        """Return the records of patches that are applied."""
        applied = (State.APPLIED, State.VERIFIED, State.HIT)
        return [record for record in self.records.values() if record.state in applied]

    def replacements(self) -> "dict[int, Any]":
        """Return ``id(replacement)`` -> what it replaced, of every patch that stands."""
        return {id(record.replacement): record.original for record in self.standing()}

    def misses(self) -> list[Record]:
        """Return the records of patches that should stand and do not.

        A planned patch whose modules nobody has imported is none: what it replaces is not used here (a rank
        of torchrun never imports the launcher, for one).
        """
        return [
            record
            for record in self.records.values()
            if record.state is State.FAILED
            or (record.state is State.PLANNED and any(t.module in sys.modules for t in record.patch.targets))
        ]

    def untested(self) -> list[Record]:
        """Return the records of patches that stand on a source of the host that they were not tested with."""
        return [record for record in self.standing() if record.source is Source.CHANGED]


def current(record: Record) -> Any:
    """Return what stands where a patch was applied, None where there is nothing any more."""
    assert record.target is not None
    try:
        owner, leaf = resolve(record.target)
    except LookupError:
        return None
    return inspect.getattr_static(owner, leaf, None)


def layers(outer: Any, replaced: Mapping[int, Any]) -> Iterator[Any]:
    """Yield a function and what lies under it: through our replacements and through ``functools.wraps``."""
    while outer is not None:
        yield outer
        outer = replaced.get(id(outer)) or getattr(plain(outer), "__wrapped__", None)


def plain(function: Any) -> Any:
    """Return the function inside a staticmethod or classmethod object."""
    return function.__func__ if isinstance(function, staticmethod | classmethod) else function


def describe(function: Any) -> str:
    """Name a function for a message."""
    if function is None:
        return "nothing"
    function = plain(function)
    return (
        f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
    )


def resolve(target: Target) -> tuple[Any, str]:
    """Return the object that holds the target and the attribute's name.

    Raises:
        LookupError: the module is not imported or the name is gone.
    """
    owner: Any = sys.modules.get(target.module)
    *parents, leaf = target.name.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    if owner is None or not hasattr(owner, leaf):
        raise LookupError(f"{target} does not exist")
    return owner, leaf


def defining_target(patch: Patch, module: str) -> Target | None:
    """Return the patch's target in ``module``, None where that module only imports the name from another."""
    for target in patch.targets:
        if target.module == module:
            owner, leaf = resolve(target)
            defined_in = getattr(inspect.unwrap(getattr(owner, leaf)), "__module__", module)
            elsewhere = {other.module for other in patch.targets} - {module}
            return None if defined_in in elsewhere else target
    return None


def fingerprint(function: Any) -> str:
    """Return 12 hex digits of the function's source text, "" where there is no source."""
    try:
        text = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def keeps_contract(found: tuple[str, ...], contract: tuple[str, ...]) -> bool:
    """True where a function's parameter names are those of the contract."""
    if contract[-1:] == (ANYTHING,):
        return found[: len(contract) - 1] == contract[:-1]
    return found == contract


def judge(patch: Patch, digest: str) -> Source:
    """Say whether a source with this fingerprint still needs the patch."""
    if digest in patch.fixed:
        return Source.FIXED
    return Source.NEEDED if digest in patch.tested else Source.CHANGED


def apply(record: Record, module: str) -> None:
    """Put the replacement in place; never raises, the record says what happened."""
    patch = record.patch
    try:
        target = defining_target(patch, module)
        if target is None:
            return  # the function lives in another of the targets, which has its own turn
        owner, leaf = resolve(target)
        original = inspect.getattr_static(owner, leaf)
        function = plain(original)
        found = tuple(inspect.signature(function).parameters)
        record.target, record.fingerprint = target, fingerprint(function)
        record.source = judge(patch, record.fingerprint)
        if record.source is Source.FIXED:
            record.state, record.reason = State.SKIPPED, f"fixed in {patch.fixed[record.fingerprint]}"
            return
        if not keeps_contract(found, patch.parameters):
            record.state = State.FAILED
            record.reason = f"refused: parameters are {found}, the patch was made for {patch.parameters}"
            return
        record.original = original
        record.replacement = _replacement(record, original)
        record.inherited = inspect.isclass(owner) and leaf not in vars(owner)
        for place, name in [(owner, leaf), *_copies(original, target)]:
            setattr(place, name, record.replacement)
            record.places.append((place, name))
        record.state = State.APPLIED
        record.reason = ""
        if record.source is Source.CHANGED:
            unknown = (
                "changed since the versions it was tested with" if record.fingerprint else "cannot be read"
            )
            record.reason = f"untested: the source of {target} {unknown}"
    except LookupError as error:
        record.reason = str(error)
        if all(other.module in sys.modules for other in patch.targets) or len(patch.targets) == 1:
            record.state = State.SKIPPED if patch.optional else State.FAILED
    except Exception as error:
        record.state, record.reason = State.FAILED, f"{type(error).__name__}: {error}"


def _replacement(record: Record, original: Any) -> Any:
    around, function = record.patch.around, plain(original)

    @functools.wraps(function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if record.state is State.REVERTED:  # somebody kept the replacement beyond its time
            return function(*args, **kwargs)
        record.hits += 1
        if record.state in (State.APPLIED, State.VERIFIED):
            record.state = State.HIT
        return around(function, *args, **kwargs)

    return replacement if function is original else type(original)(replacement)


def _copies(original: Any, target: Target) -> list[tuple[Any, str]]:
    """Where other modules of the package, or the program, did ``from module import name`` before us."""
    if "." in target.name:
        return []  # a method is looked up on its class
    package = target.module.partition(".")[0]
    return [
        (module, name)
        for key, module in list(sys.modules.items())
        if module is not None
        and key.partition(".")[0] in {package, "__main__", "__mp_main__"}
        and key != target.module
        for name, value in list(vars(module).items())
        if value is original
    ]
