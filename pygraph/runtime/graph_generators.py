"""Random generators of a graph's own, which draw the numbers of the caller's generators.

A replay copies the state there and back, so that the graph does not depend on the caller's object: whatever that is
seeded with, or whoever holds it. A capture that fails leaves the generators that it has drawn from unusable on CUDA
(torch 2.11), which are then not the caller's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence

import torch


class GraphGenerator:
    """A generator that a graph is recorded with instead of the caller's.

    Attributes:
        original: The caller's generator.
        own: The generator that the graph draws from.
    """

    def __init__(self, original: torch.Generator) -> None:
        self.original = original
        self.own = torch.Generator(device=original.device)

    def take(self) -> None:
        """Copy the caller's state to the graph's generator."""
        self.own.set_state(self.original.get_state())

    def give(self) -> None:
        """Copy the state of the graph's generator to the caller's."""
        put_back(self.original, self.own.get_state())


def put_back(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set a generator to a state as if it had drawn its numbers up to there.

    `set_state` would have cuDNN draw a new seed for the dropout of recurrent layers, as after `torch.manual_seed`. A
    second generator with the same state is not the one that cuDNN asks (torch 2.11 to 2.13, `CUDAGeneratorImpl.cpp`).
    """
    same = generator.graphsafe_get_state() if generator.device.type == "cuda" else generator
    same.set_state(state)


@contextlib.contextmanager
def drawing(generators: Sequence[GraphGenerator]) -> Generator[None, None, None]:
    """A block in which a graph draws the numbers that the callers' generators have next."""
    for generator in generators:
        generator.take()
    yield
    for generator in generators:
        generator.give()


class SavedStates:
    """The present states of generators, to which they can be put back."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._states = [(generator, generator.get_state()) for generator in dict.fromkeys(generators)]

    def restore(self) -> None:
        """Put the generators back."""
        for generator, state in self._states:
            put_back(generator, state)
