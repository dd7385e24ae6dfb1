"""Random generators of the host that a function seeds or draws from while it is traced: noticed, and put back."""

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

from pygraph.tracing.patches import replaced
from pygraph.tracing.proxy_trace import tracing_here

_NAMES = ("torch's generator", "the generator of Python's random", "NumPy's generator", "torch.cuda's generator")
_PUT_BACK = (torch.set_rng_state, random.setstate, np.random.set_state, torch.cuda.set_rng_state)


class Generators:
    """The generators as they are now: of the host, and of the current CUDA device if CUDA is in use."""

    def __init__(self) -> None:
        self._before = _states()
        self._thread = threading.get_ident()
        self._seeded: set[str] = set()
        self._draws = 0
        self._taken: dict[int, tuple[torch.Tensor, int]] = {}

    def moved(self) -> str | None:
        """The first generator that this thread has seeded, or that is not in the state that it was in."""
        differ = {
            name for name, now, then in zip(_NAMES, _states(), self._before, strict=False) if not _same_state(now, then)
        }
        return next((name for name in _NAMES if name in self._seeded | differ), None)

    def drawing(self) -> str | None:
        """Return `moved`, and count a draw on fake tensors, which moves no generator."""
        moved = self.moved()
        self._draws += 1
        return moved

    def _take(self, state: torch.Tensor) -> torch.Tensor:
        self._taken[id(state)] = state, self._draws
        return state

    def _put_back(self, generator: str, state: torch.Tensor) -> None:
        """Note the generator as seeded if it gets a state that was taken before other draws, or elsewhere.

        Draws on fakes do not move a generator. ``torch.utils.checkpoint`` sets a state to draw the same numbers again.
        """
        if self._taken.get(id(state), (None, -1))[1] != self._draws:
            self._note(generator)

    def restore(self) -> str | None:
        """Put generators back that have moved; returns `moved` from before."""
        moved = self.moved()
        for put_back, now, then in zip(_PUT_BACK, _states(), self._before, strict=False):
            if not _same_state(now, then):
                put_back(then)
        return moved

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
            def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
                self._put_back(cuda, new_state)
                original(new_state, *args, **kwargs)

            return set_rng_state

        def getting(original: Any) -> Any:
            def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
                return self._take(original(*args, **kwargs))

            return get_rng_state

        def noticed_generator(original: Any) -> Any:
            return _Noticed(original, lambda: self._note(host), self._take, lambda state: self._put_back(host, state))

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
    """A generator that reports seeds, and states that are taken and put back."""

    def __init__(
        self,
        generator: torch.Generator,
        note: Callable[[], None],
        take: Callable[[torch.Tensor], torch.Tensor],
        put_back: Callable[[torch.Tensor], None],
    ) -> None:
        self._generator = generator
        self._note, self._take, self._put_back = note, take, put_back

    def get_state(self) -> torch.Tensor:
        return self._take(self._generator.get_state())

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        self._put_back(state)
        return self._generator.set_state(state)

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
