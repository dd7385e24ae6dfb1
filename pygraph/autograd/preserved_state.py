"""State that a second run of a function needs from before the first: random states, and tensors that it has updated.

Second derivatives outside run the user's function again (`pygraph.autograd.backward.Backward`), as a checkpoint does.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter  # checked with torch 2.11 and 2.13

from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import RandomStates
from pygraph.runtime.graph_generators import SavedStates


@dataclasses.dataclass(frozen=True, eq=False)
class Effects:
    """The effects of a function, so that a second run may give other results.

    Attributes:
        draws: Whether it draws random numbers.
        arguments: Which of its tensors it updates in place, by number, and whether its results may depend on what they
            were, as they do not on running statistics.
        captured: The tensors that it closes over and updates in place, likewise.
        generators: The random generators that it passes to operations.
    """

    draws: bool
    arguments: dict[int, bool]
    captured: tuple[tuple[torch.Tensor, bool], ...]
    generators: tuple[torch.Generator, ...] = ()

    def preserve(self, tensors: Sequence[torch.Tensor]) -> PreservedState:
        """Copy the state that a call with these tensors depends on."""
        arguments = (tensors[index] for index, is_read in self.arguments.items() if is_read)
        captured = (tensor for tensor, is_read in self.captured if is_read)
        devices = {tensor.device for tensor in tensors} if self.draws else set[torch.device]()
        return PreservedState([*arguments, *captured], devices, self.generators)


class PreservedState:
    """The present contents of tensors and states of random generators.

    Args:
        tensors: The tensors.
        devices: The devices of the default generators; none if no random numbers are drawn. The host's is added.
        generators: The other generators that are drawn from.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], devices: set[torch.device], generators: Sequence[torch.Generator] = ()
    ) -> None:
        with torch.no_grad():
            self._contents = [(tensor.detach(), tensor.detach().clone()) for tensor in tensors]
        drivers = [driver for driver in map(driver_for, devices) if driver is not None]
        self._defaults = RandomStates(drivers) if devices else None
        self._others = SavedStates(generators)
        self._tensors, self._devices, self._generators = tensors, devices, generators

    @contextlib.contextmanager
    def restored(self) -> Generator[None, None, None]:
        """Restore the state for a while."""
        now = PreservedState(self._tensors, self._devices, self._generators)
        self._restore()
        try:
            yield
        finally:
            now._restore()

    def _restore(self) -> None:
        with torch.no_grad():
            for tensor, contents in self._contents:
                with _unsafe_preserve_version_counter(tensor):
                    tensor.copy_(contents)
        if self._defaults is not None:
            self._defaults.restore()
        self._others.restore()
