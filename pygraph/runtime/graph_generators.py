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
        self.original.set_state(self.own.get_state())


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
            generator.set_state(state)
