"""A detector of fake tensors and symbols of traces that outlive them."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def fakes_left() -> list[Any]:
    """Fake tensors, and numbers that stand for others, that are alive after garbage was collected."""
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
