"""Attestation: which substituted modules really called their back end in the first step of this rank.

Hooks on every such module note that it runs, the switch notes the calls of its operator. A module that ran
past its switch, or was never called, shows up; what backward recomputes is counted apart, and what another
model calls through the same switch (a reference model, for one) is not counted.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from llamafactory_ascend.kernels.substitution import Slot


class _Owners(threading.local):
    """The module that this thread is in, by operator: backward recomputes layers in a thread of its own."""

    def __init__(self) -> None:
        self.by_operator: dict[str, int] = {}


class Attestation:
    """Counts from `start` to `stop`; neither hooks nor counters are left behind."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.slots = list(slots)
        self.ran: Counter[tuple[str, int]] = Counter()
        self.forward: Counter[tuple[str, int]] = Counter()
        self.recomputed: Counter[tuple[str, int]] = Counter()
        self._owners = _Owners()
        self._handles: list[Any] = []

    def start(self) -> None:
        """Watch every slot."""
        for slot in self.slots:
            module = slot.alive()
            if module is not None:
                self._handles.append(module.register_forward_pre_hook(self._enter(slot, module)))
                leave = module.register_forward_hook(self._leave(slot), always_call=True)
                self._handles.append(leave)  # always: recomputation leaves a layer by an exception
            slot.switch.counting = self._call

    def stop(self) -> None:
        """Remove the hooks and the counters; what was counted stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for slot in self.slots:
            slot.switch.counting = None

    def _enter(self, slot: Slot, module: nn.Module) -> Any:
        operator, key = slot.switch.operator, id(module)

        def enter(module: nn.Module, args: Any) -> None:
            self._owners.by_operator[operator] = key
            if module.training:
                self.ran[operator, key] += 1

        return enter

    def _leave(self, slot: Slot) -> Any:
        operator = slot.switch.operator

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._owners.by_operator.pop(operator, None)

        return leave

    def _call(self, operator: str) -> None:
        key = self._owners.by_operator.get(operator)
        if key is not None:
            in_backward = torch._C._current_graph_task_id() != -1
            (self.recomputed if in_backward else self.forward)[operator, key] += 1

    def result(self) -> dict[str, dict[str, Any]]:
        """Return, by operator, the back ends and counts.

        Returns:
            For each operator: ``backends`` in use; ``modules`` that hold it, ``called`` of them, their
            ``calls`` in forward and ``recomputed`` in backward, ``bypassed`` (names of those that ran without
            their switch) and ``idle`` (names of those that did not run at all).
        """
        found: dict[str, dict[str, Any]] = {}
        for slot in self.slots:
            key = (
                slot.switch.operator,
                id(slot.alive() or slot),
            )  # of a module that is gone: nothing counted
            entry = found.setdefault(
                slot.switch.operator,
                {
                    "backends": [],
                    "modules": 0,
                    "called": 0,
                    "calls": 0,
                    "recomputed": 0,
                    "bypassed": [],
                    "idle": [],
                },
            )
            if slot.switch.backend not in entry["backends"]:
                entry["backends"].append(slot.switch.backend)
            entry["modules"] += 1
            entry["called"] += self.forward[key] > 0
            entry["calls"] += self.forward[key]
            entry["recomputed"] += self.recomputed[key]
            if not self.forward[key]:
                entry["bypassed" if self.ran[key] else "idle"].append(slot.name)
        return found
