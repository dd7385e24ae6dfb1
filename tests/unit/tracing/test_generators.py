"""Random generators of the host that move during a trace: by the function, or by another thread meanwhile."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import pygraph
from pygraph.errors import TraceError

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1),
    "random": lambda: random.random(),
    "numpy": lambda: np.random.rand(),
}


def states() -> int:
    return hash(f"{torch.get_rng_state().tolist()} {random.getstate()} {np.random.get_state()}")


class Beside:
    """Another thread, which traced functions get to by the name of this module, where a trace does not look."""

    def __init__(self) -> None:
        self.draw: Callable[[], Any] = lambda: None
        self.states: list[int] = []
        self._thread: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def running(self, draw: Callable[[], Any]) -> Generator[None, None, None]:
        with ThreadPoolExecutor(1) as self._thread:
            self.draw = draw
            self.states.clear()
            self.ask(int)  # it is there from now on
            yield
            self._thread = None

    def ask(self, work: Callable[[], Any]) -> Any:
        assert self._thread is not None
        return self._thread.submit(work).result()

    def turn(self) -> None:
        """Draw, at the first turn, and note the generators' states."""
        if not self.states:
            self.ask(self.draw)
        self.states.append(self.ask(states))


BESIDE = Beside()


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_another_thread_draws_meanwhile(name: str, draws: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        sys.modules[__name__].BESIDE.turn()
        return x + torch.rand_like(x) if draws else x + 1

    before = states()
    with BESIDE.running(DRAWS[name]):
        pygraph.trace(fn)(torch.ones(3))
    first, second = BESIDE.states  # two runs: the second one tells that it was not the function
    assert (first != before, second == before) == (True, True)
    assert states() == first  # the other thread's numbers are not drawn again


@pytest.mark.parametrize("name", [*DRAWS, "seed"])
def test_the_function_draws_beside_a_thread(name: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            if name == "seed":
                torch.default_generator.manual_seed(3)
            else:
                DRAWS[name]()
        return x + 1

    before = states()
    with BESIDE.running(lambda: None), pytest.raises(TraceError, match="it seeds or draws from"):
        pygraph.trace(fn)(torch.ones(3))
    assert states() == before
