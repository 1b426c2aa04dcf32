"""The ledger: what it applies, refuses, verifies, counts and takes back."""

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamafactory_ascend import patching
from llamafactory_ascend.errors import AscendError
from llamafactory_ascend.patching import ANYTHING, Ledger, Patch, Source, State, Target

CODE = """
def double(number, times=2):
    return number * times

class Base:
    def inherited(self, number):
        return number

class Thing(Base):
    def method(self, number):
        return number + 1
    @staticmethod
    def static(number):
        return number + 2
    @classmethod
    def maker(cls, number):
        return cls.__name__, number
"""


def add_hundred(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    return (found[0], found[1] + 100) if isinstance(found, tuple) else found + 100


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A package with CODE in `target.inner`; `target.early` binds `double` before any patch."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target/__init__.py").write_text("from .inner import double\n")
    (tmp_path / "target/inner.py").write_text(CODE)
    (tmp_path / "target/early.py").write_text("from .inner import double as twice\n")
    monkeypatch.syspath_prepend(tmp_path)
    import target.early  # type: ignore[import-not-found]

    yield target
    for name in [name for name in sys.modules if name.partition(".")[0] == "target"]:
        del sys.modules[name]


def make(name: str = "double", parameters: tuple[str, ...] = ("number", "times"), **changes: Any) -> Patch:
    return Patch(
        **{
            "id": name,
            "targets": (Target("target.inner", name),),
            "around": add_hundred,
            "parameters": parameters,
            "why": "a test",
            "remove_when": "never",
            **changes,
        }
    )


def applied(*patches: Patch) -> Ledger:
    ledger = Ledger()
    for patch in patches:
        ledger.add(patch)
    ledger.module_ready("target.inner")
    return ledger


def test_life_of_a_patch(host: Any) -> None:
    original = host.inner.double
    ledger = applied(make())
    record = ledger.records["double"]
    assert record.state is State.APPLIED
    ledger.verify()
    assert record.state is State.VERIFIED
    assert (host.inner.double(3), record.hits, record.state) == (106, 1, State.HIT)
    ledger.verify()
    assert record.state is State.HIT
    ledger.revert()
    assert record.state is State.REVERTED
    assert host.inner.double is host.double is host.early.twice is original


def test_names_bound_early_are_replaced_and_given_back(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = types.ModuleType("__mp_main__")
    program.double = host.inner.double  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__mp_main__", program)
    ledger = applied(make())
    assert host.double(1) == host.early.twice(1) == program.double(1) == 102
    places = ledger.records["double"].places
    assert {f"{place.__name__}.{name}" for place, name in places} == {
        "target.inner.double",
        "target.double",
        "target.early.twice",
        "__mp_main__.double",
    }
    ledger.revert()
    assert host.double(1) == host.early.twice(1) == program.double(1) == 2


def test_methods(host: Any) -> None:
    """Plain, static, class and inherited methods; the base class of the last keeps its own."""
    names = {
        "method": ("self", "number"),
        "static": ("number",),
        "maker": ("cls", "number"),
        "inherited": ("self", "number"),
    }
    before = dict(vars(host.inner.Thing))
    ledger = applied(*(make(f"Thing.{name}", parameters) for name, parameters in names.items()))
    thing = host.inner.Thing()
    assert (thing.method(1), thing.static(1), host.inner.Thing.static(1)) == (102, 103, 103)
    assert (thing.maker(1), host.inner.Thing.maker(1)) == (("Thing", 101), ("Thing", 101))
    assert (thing.inherited(1), host.inner.Base().inherited(1)) == (101, 1)
    ledger.verify()
    assert {record.state for record in ledger.records.values()} == {State.HIT}
    ledger.revert()
    assert dict(vars(host.inner.Thing)) == before


@pytest.mark.parametrize(
    ("parameters", "state"),
    [
        (("number", "times"), State.APPLIED),
        (("number", ANYTHING), State.APPLIED),
        ((ANYTHING,), State.APPLIED),
        (("number",), State.FAILED),
        (("times", "number"), State.FAILED),
        (("amount", ANYTHING), State.FAILED),
    ],
)
def test_contract(host: Any, parameters: tuple[str, ...], state: State) -> None:
    record = applied(make(parameters=parameters)).records["double"]
    assert record.state is state
    assert host.inner.double(1) == (102 if state is State.APPLIED else 2)
    if state is State.FAILED:
        assert (
            record.reason
            == f"refused: parameters are ('number', 'times'), the patch was made for {parameters}"
        )


def test_source_of_the_target(host: Any) -> None:
    """Tested: applied and nothing said; fixed upstream: left alone; anything else: applied, and said."""
    digest = patching.fingerprint(host.inner.double)
    assert len(digest) == 12
    tested = applied(make(tested={digest: "1.0"})).records["double"]
    assert (tested.state, tested.source, tested.reason) == (State.APPLIED, Source.NEEDED, "")
    unknown = applied(make(id="unknown", tested={"0" * 12: "1.0"}))
    assert unknown.untested() == [unknown.records["unknown"]]
    assert unknown.records["unknown"].reason == (
        "untested: the source of target.inner:double changed since the versions it was tested with"
    )
    fixed = applied(make(id="fixed", fixed={digest: "2.0"})).records["fixed"]
    assert (fixed.state, fixed.source, fixed.reason) == (State.SKIPPED, Source.FIXED, "fixed in 2.0")


def test_source_that_cannot_be_read(host: Any) -> None:
    exec("def double(number, times=2): return 0", vars(host.inner))
    record = applied(make()).records["double"]
    assert (record.state, record.fingerprint) == (State.APPLIED, "")
    assert record.reason == "untested: the source of target.inner:double cannot be read"


def test_alternative_targets(host: Any) -> None:
    """The first module that defines the function counts; one that only imports it, or lacks it, does not."""
    only_imports = make(targets=(Target("target.inner", "double"), Target("target", "double")))
    ledger = Ledger()
    record = ledger.add(only_imports)
    ledger.module_ready("target")
    assert record.state is State.PLANNED
    ledger.module_ready("target.inner")
    assert (record.state, str(record.target), host.double(1)) == (State.APPLIED, "target.inner:double", 102)
    ledger.revert()

    moved = ledger.add(
        make(id="moved", targets=(Target("target.early", "gone"), Target("target.inner", "double")))
    )
    del sys.modules["target.inner"]
    ledger.module_ready("target.early")
    assert (moved.state, moved.reason) == (State.PLANNED, "target.early:gone does not exist")
    sys.modules["target.inner"] = host.inner
    ledger.module_ready("target.inner")
    assert (moved.state, moved.reason[:8]) == (State.APPLIED, "untested")


def test_target_gone(host: Any) -> None:
    ledger = applied(make("vanished"), make("Thing.nothing"), make())
    assert [ledger.records[name].state for name in ("vanished", "Thing.nothing", "double")] == [
        State.FAILED, State.FAILED, State.APPLIED,
    ]  # fmt: skip
    assert ledger.records["Thing.nothing"].reason == "target.inner:Thing.nothing does not exist"
    assert [record.patch.id for record in ledger.misses()] == ["vanished", "Thing.nothing"]


def test_optional_target_gone(host: Any) -> None:
    """A function that only some versions of the host have: there is nothing to miss in the others."""
    ledger = applied(make("vanished", optional=True))
    assert ledger.records["vanished"].state is State.SKIPPED
    assert ledger.misses() == []


def test_planned_patch_is_a_miss_only_where_its_module_is_used(host: Any) -> None:
    ledger = Ledger()
    ledger.add(make(id="elsewhere", targets=(Target("target.never_imported", "x"),)))
    waiting = ledger.add(make())
    assert ledger.misses() == [waiting]


def test_two_patches_on_one_target(host: Any) -> None:
    """The later one is outermost; both stand, and they come off in reverse order."""
    calls: list[str] = []

    def outer(original: Callable[..., int], number: int, times: int = 2) -> int:
        calls.append("outer")
        return original(number, times) * 1000

    ledger = applied(make(), make(id="outer", around=outer))
    original = ledger.records["double"].original
    assert ledger.records["double"].fingerprint == ledger.records["outer"].fingerprint
    assert (host.inner.double(1), host.early.twice(1)) == (102_000, 102_000)
    ledger.verify()
    assert {record.state for record in ledger.records.values()} == {State.HIT}
    ledger.revert()
    assert host.inner.double is host.early.twice is original
    assert calls == ["outer", "outer"]


def test_replaced_by_somebody_else(host: Any) -> None:
    """It is reported and left standing; our replacement, where somebody kept it, only passes calls on."""
    ledger = applied(make())
    record, kept = ledger.records["double"], host.inner.double

    def theirs(number: int, times: int = 2) -> int:
        return -1

    host.inner.double = theirs
    ledger.verify()
    assert record.state is State.FAILED
    assert record.reason.startswith("replaced after it was applied, by ")
    assert record.reason.endswith("theirs")
    assert kept(1) == 102
    assert record.state is State.FAILED, "a call through an old name does not make it stand again"
    ledger.revert()
    assert host.inner.double is theirs


def test_wrapped_by_somebody_else(host: Any) -> None:
    """A wrapper that still calls ours is no loss; reverting leaves it in place with nothing of ours below."""
    ledger = applied(make())
    record, ours = ledger.records["double"], host.inner.double

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs) + 5

    host.inner.double = theirs
    ledger.verify()
    assert (record.state, host.inner.double(1)) == (State.VERIFIED, 107)
    ledger.revert()
    assert host.inner.double is theirs
    assert host.inner.double(1) == 7
    assert record.state is State.REVERTED
    assert record.reason == "inert, and left in place under target.inner.double"


def test_attribute_deleted_after_it_was_applied(host: Any) -> None:
    ledger = applied(make())
    del host.inner.double
    ledger.verify()
    assert ledger.records["double"].reason == "replaced after it was applied, by nothing"


def test_same_id_twice() -> None:
    ledger = Ledger()
    ledger.add(make())
    with pytest.raises(AscendError, match="two patches are called `double`"):
        ledger.add(make())


def test_module_ready_from_many_threads(host: Any) -> None:
    """However many threads report a module at once, a patch is applied once."""
    ledger = Ledger()
    ledger.add(make())
    start = threading.Barrier(16)

    def report() -> None:
        start.wait()
        ledger.module_ready("target.inner")

    threads = [threading.Thread(target=report) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert host.inner.double(1) == 102


def test_every_built_in_patch_is_watched_and_tested_with_this_host() -> None:
    """Each knows the source it meets here: its fingerprint is in `tested` or `fixed`."""
    import importlib

    from llamafactory_ascend.host import seams
    from llamafactory_ascend.host.plugin import ascend_patches

    unknown = []
    for patch in ascend_patches():
        assert patch.why.endswith(".") and patch.remove_when
        for target in patch.targets:
            try:
                importlib.import_module(target.module)
            except ModuleNotFoundError:
                continue  # a module that only other versions of the host have
            try:
                found = patching.defining_target(patch, target.module)
            except LookupError:
                assert patch.optional, f"{target} does not exist"
                continue
            if found is None:
                continue
            owner, leaf = patching.resolve(found)
            digest = patching.fingerprint(patching.plain(vars(owner).get(leaf) or getattr(owner, leaf)))
            if digest not in {**patch.tested, **patch.fixed}:
                unknown.append(f'{patch.id}: "{digest}" of {found}')
    assert unknown == []
    assert len(set(seams.MODULES)) == len(seams.MODULES)
