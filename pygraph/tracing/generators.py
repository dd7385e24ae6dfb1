"""Random generators that a function could seed or draw from behind the trace's back: noticed, and put back."""

# The seeding functions of torch go through one generator object, which is private to its module.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch

_NAMES = ("torch's generator", "the generator of Python's random", "NumPy's generator", "torch.cuda's generator")
_PUT_BACK = (torch.set_rng_state, random.setstate, np.random.set_state, torch.cuda.set_rng_state)


class Generators:
    """The generators as they are now: of the host, and of the current CUDA device if CUDA is in use."""

    def __init__(self) -> None:
        self._before = _states()
        self._thread = threading.get_ident()
        self._seeded: set[str] = set()

    def moved(self) -> str | None:
        """The first generator that this thread has seeded, or that is not in the state that it was in."""
        differ = {
            name for name, now, then in zip(_NAMES, _states(), self._before, strict=False) if not _same_state(now, then)
        }
        return next((name for name in _NAMES if name in self._seeded | differ), None)

    def restore(self) -> str | None:
        """Put back what has moved; what `moved` says before that."""
        moved = self.moved()
        for put_back, now, then in zip(_PUT_BACK, _states(), self._before, strict=False):
            if not _same_state(now, then):
                put_back(then)
        return moved

    @contextlib.contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Notice seeds that lead to where a generator is already, so that its state does not tell."""
        undo: list[Callable[[], None]] = []

        def replace(module: Any, name: str, generator: str) -> None:
            original = getattr(module, name)

            @functools.wraps(original)
            def noticed(*args: Any, **kwargs: Any) -> Any:
                self._note(generator)
                return original(*args, **kwargs)

            undo.append(lambda: setattr(module, name, original))
            setattr(module, name, noticed)

        seeds: Any = torch.random  # whose functions look their generator up there; checked with torch 2.11 and 2.13
        host = seeds.default_generator
        seeds.default_generator = _Noticed(host, lambda: self._note(_NAMES[0]))
        try:
            replace(random, "seed", _NAMES[1])
            replace(np.random, "seed", _NAMES[2])
            for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
                replace(torch.cuda, name, _NAMES[3])
            yield
        finally:
            seeds.default_generator = host
            for step in undo:
                step()

    def _note(self, generator: str) -> None:
        if threading.get_ident() == self._thread:
            self._seeded.add(generator)


class _Noticed:
    """A generator whose seeds are noticed."""

    def __init__(self, generator: torch.Generator, note: Callable[[], None]) -> None:
        self._generator = generator
        self._note = note

    def manual_seed(self, seed: int) -> torch.Generator:
        self._note()
        return self._generator.manual_seed(seed)

    def seed(self) -> int:
        self._note()
        return self._generator.seed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def _states() -> list[Any]:
    states: list[Any] = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _same_state(now: Any, then: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return torch.equal(now, then)
    if isinstance(now, tuple):
        return all(np.array_equal(a, b) for a, b in zip(now, then, strict=True))
    return bool(now == then)
