"""A detector of fake tensors and symbols of traces that outlive them."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_known: list[Any] = []


def know_fakes(*, forget: bool = False) -> None:
    """Count what is alive now as somebody else's: Dynamo and Inductor keep fakes of what they have compiled."""
    _known[:] = [] if forget else _alive()


def fakes_left() -> list[Any]:
    """Fake tensors, and numbers that stand for others, that are alive after garbage was collected."""
    known = set(map(id, _known))
    return [value for value in _alive() if id(value) not in known]


def _alive() -> list[Any]:
    gc.unfreeze()  # what tests/conftest.py sets aside is not seen, and a trace may bring it back
    gc.collect()
    kinds: dict[type, bool] = {}
    found: list[Any] = []
    for value in gc.get_objects():
        kind = type(value)
        if kind not in kinds:
            kinds[kind] = issubclass(kind, (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool))
        if kinds[kind]:
            found.append(value)
    return found


def assert_no_fake_left() -> None:
    """Fail if there are any."""
    found = fakes_left()
    holders = [sorted({type(holder).__name__ for holder in gc.get_referrers(value)}) for value in found[:3]]
    assert not found, f"{len(found)} left, held by {holders}"
