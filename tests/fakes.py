"""A detector of fake tensors and symbols of traces that outlive them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Generator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_made: list[weakref.ref[Any]] | None = None


@contextlib.contextmanager
def fakes_followed() -> Generator[None, None, None]:
    """Know the modes and environments of symbols that are made inside, for `fakes_left`.

    To look for fakes among all objects takes seconds in a process that has run many tests, and would find what Dynamo
    and Inductor keep of theirs. Fakes hold their modes, and symbols their environments.
    """
    global _made
    original = FakeTensorMode.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _made is not None:
            _made.append(weakref.ref(self))
            if self.shape_env is not None:
                _made.append(weakref.ref(self.shape_env))

    before, _made = _made, []
    FakeTensorMode.__init__ = init
    try:
        yield
    finally:
        FakeTensorMode.__init__, _made = original, before


def fakes_left() -> list[Any]:
    """Fake tensors, and numbers that stand for others, that were made where they are followed and are alive."""
    assert _made is not None, "fakes are not followed here"
    for generation in (1, 2):  # what a test has made is mostly young, and a whole collection takes half a second
        gc.collect(generation)
        owners = {id(owner) for reference in _made if (owner := reference()) is not None}
        if not owners:
            return []
    return [value for value in _all_fakes() if id(_owner(value)) in owners]


def assert_no_fake_left() -> None:
    """Fail if there are any."""
    found = fakes_left()
    holders = [sorted({type(holder).__name__ for holder in gc.get_referrers(value)}) for value in found[:3]]
    assert not found, f"{len(found)} left, held by {holders}"


def _all_fakes() -> list[Any]:
    gc.unfreeze()  # what tests/conftest.py sets aside is not seen, and may hold what is looked for as garbage
    gc.collect()
    try:
        return _fakes_among_objects()
    finally:
        gc.freeze()


def _fakes_among_objects() -> list[Any]:
    kinds: dict[type, bool] = {}
    found: list[Any] = []
    for value in gc.get_objects():
        kind = type(value)
        if kind not in kinds:
            kinds[kind] = issubclass(kind, (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool))
        if kinds[kind]:
            found.append(value)
    return found


def _owner(value: Any) -> Any:
    return value.fake_mode if isinstance(value, FakeTensor) else getattr(value.node, "shape_env", None)
