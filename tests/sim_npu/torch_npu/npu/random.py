"""``torch.npu.random``: the random stream of each simulated device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import torch_npu

from . import _get_device_index, device_count

default_generators = tuple(torch_npu._sim.default_generator(i) for i in range(device_count()))


def _generator(device: Any = None) -> torch.Generator:
    return default_generators[_get_device_index(device)]


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    """The state as a uint8 CPU tensor."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    _generator(device).set_state(new_state.clone(memory_format=torch.contiguous_format))


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    _generator().seed()


def seed_all() -> None:
    manual_seed_all(_generator().seed())


def initial_seed() -> int:
    return _generator().initial_seed()
