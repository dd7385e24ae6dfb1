"""Random generators that a function seeds, or draws from on the host, while it is traced: noticed, and put back.

Where it reads and sets the state of one, as a checkpoint does, that is recorded as operations.
"""

# The seeding functions of torch go through one generator object, which is private to its module.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode  # checked with torch 2.11 and 2.13

from pygraph.ir.device_arguments import with_index
from pygraph.ir.random_states import random_state, set_random_state
from pygraph.tracing.patches import replaced
from pygraph.tracing.proxy_trace import tracing_here
from pygraph.tracing.settings import is_alone

_NAMES = ("torch's generator", "the generator of Python's random", "NumPy's generator", "torch.cuda's generator")
_PUT_BACK = (torch.set_rng_state, random.setstate, np.random.set_state, torch.cuda.set_rng_state)


class Generators:
    """The generators as they are now: of the host, and of the current CUDA device if CUDA is in use.

    They are the process's: another thread may draw from them, which must not be undone. So if it is not known who has
    moved one, the function is run again from the state that was before. If the generator moves again, it counts as the
    function's doing; else it gets the state that the other thread has left.

    Args:
        unclear: The generators of a first run, after which that was not known.

    Attributes:
        unclear: The first one that the function or another thread has moved, and that was left so.
    """

    def __init__(self, unclear: Generators | None = None) -> None:
        self._others = _states()  # what another thread has left, if this is a second run
        self._before = self._others if unclear is None else unclear._before
        self._first = unclear
        if unclear is not None:
            _put_back(self._others, self._before)
        self._thread = threading.get_ident()
        self._seeded: set[str] = set()
        self.unclear: str | None = None

    def moved(self) -> str | None:
        """The first generator that this thread has seeded, or that is not in the state that it was in."""
        differ = self._differ() - self._seeded
        if differ and self._first is None and not is_alone():
            self.unclear = self.unclear or _first_of(differ)
            differ = set()
        return _first_of(self._seeded | differ)

    def restore(self) -> str | None:
        """Put generators back that have moved; returns `moved` from before."""
        moved = self.moved()
        differ = self._differ() & (set(_NAMES) if self.unclear is None else self._seeded)
        now = _states()
        left = now if self._first is None else self._others
        _put_back(
            now,
            [
                before if name in differ else other
                for name, before, other in zip(_NAMES, self._before, left, strict=False)
            ],
        )
        return moved

    def _differ(self) -> set[str]:
        pairs = zip(_NAMES, _states(), self._before, strict=False)
        return {name for name, now, then in pairs if not _same_state(now, then)}

    @contextlib.contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Note seeds as well that a generator has already, so that its state does not change."""

        def seeding(generator: str) -> Callable[[Any], Any]:
            def instead(original: Any) -> Any:
                @functools.wraps(original)
                def noticed(*args: Any, **kwargs: Any) -> Any:
                    self._note(generator)
                    return original(*args, **kwargs)

                return noticed

            return instead

        host, cuda = _NAMES[0], _NAMES[3]

        def setting(original: Any) -> Any:
            def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
                if _is_recorded():
                    set_random_state()(new_state, with_index(device))
                else:
                    original(new_state, device)

            return set_rng_state

        def getting(original: Any) -> Any:
            def get_rng_state(device: Any = "cuda") -> torch.Tensor:
                state = original(device)
                return random_state()(with_index(device), state.numel()) if _is_recorded() else state

            return get_rng_state

        def noticed_generator(original: Any) -> Any:
            return _Noticed(original, lambda: self._note(host))

        with contextlib.ExitStack() as stack:
            # Torch's functions look their generator up there; checked with torch 2.11 and 2.13.
            stack.enter_context(replaced(torch.random, "default_generator", noticed_generator))
            stack.enter_context(replaced(torch.cuda, "get_rng_state", getting))
            stack.enter_context(replaced(torch.cuda, "set_rng_state", setting))
            stack.enter_context(replaced(random, "seed", seeding(_NAMES[1])))
            stack.enter_context(replaced(np.random, "seed", seeding(_NAMES[2])))
            for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
                stack.enter_context(replaced(torch.cuda, name, seeding(cuda)))
            yield

    def _note(self, generator: str) -> None:
        # Where modes are off for a while, the function's own thread seeds all the same.
        if threading.get_ident() == self._thread or tracing_here():
            self._seeded.add(generator)


class _Noticed:
    """A generator of the CPU that reports seeds; in a trace, its state is read and set by operations."""

    def __init__(self, generator: torch.Generator, note: Callable[[], None]) -> None:
        self._generator, self._note = generator, note

    def get_state(self) -> torch.Tensor:
        state = self._generator.get_state()
        return random_state()(_CPU, state.numel()) if _is_recorded() else state

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        if not _is_recorded():
            return self._generator.set_state(state)
        set_random_state()(state, _CPU)
        return self._generator

    def manual_seed(self, seed: int) -> torch.Generator:
        self._note()
        return self._generator.manual_seed(seed)

    def seed(self) -> int:
        self._note()
        return self._generator.seed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


_CPU = torch.device("cpu")


def _is_recorded() -> bool:
    """Whether what runs here is recorded, and not what interrupts a trace."""
    return get_proxy_mode() is not None and tracing_here()


def _put_back(states: Iterable[Any], before: Iterable[Any]) -> None:
    for put_back, now, then in zip(_PUT_BACK, states, before, strict=False):
        if not _same_state(now, then):
            put_back(then)


def _first_of(names: set[str]) -> str | None:
    return next((name for name in _NAMES if name in names), None)


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
