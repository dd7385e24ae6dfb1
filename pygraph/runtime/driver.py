"""What the runtime needs of a device: recording a graph, its nodes' parameter bytes, patching, replay, memory.

Everything above this interface (discovery, proof, memory, execution) is the same code on every device.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RecordedNode:
    """One node of a recorded graph, as it was recorded.

    Attributes:
        kind: ``kernel``, ``memcpy``, ``memset``, or the driver's name of another kind.
        name: The kernel's name, or the kind.
        op: The number given to the last ``mark`` before the node was recorded; -1 if that is not known.
        params: Every parameter byte that can be patched; each argument starts at a multiple of eight.
    """

    kind: str
    name: str
    op: int
    params: bytes


class RecordedGraph(abc.ABC):
    """A recorded graph that can be patched and replayed."""

    nodes: tuple[RecordedNode, ...]
    draws: bool = False
    """Whether it draws random numbers from the device's generator."""

    @abc.abstractmethod
    def params_address(self, node: int) -> int:
        """Address of a writable copy of that node's ``params`` bytes, same length; ``commit`` sends it."""

    @abc.abstractmethod
    def commit(self, node: int) -> None:
        """Make the writable copy of that node's parameters those of the next replay."""

    @abc.abstractmethod
    def replay(self) -> None:
        """Launch the graph on the current stream."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give back the graph and its hold on the pool; calling it again does nothing."""


class Pool(abc.ABC):
    """Private memory that recordings of one function share; replays on it are ordered one after another."""

    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that the pool holds of the device's memory."""

    @abc.abstractmethod
    def order(self) -> None:
        """Make work on the current stream wait for the pool's last replay, if that was on another stream."""


@dataclasses.dataclass
class Counters:
    """What a driver has done since it was made. A graph replay counts as one launch."""

    launches: int = 0
    copies: int = 0
    copied_bytes: int = 0
    synchronizations: int = 0
    captures: int = 0
    replays: int = 0
    patches: int = 0


class Driver(abc.ABC):
    """A device as the runtime sees it."""

    device: torch.device
    counters: Counters

    @abc.abstractmethod
    def new_pool(self) -> Pool:
        """A fresh, empty memory pool."""

    @abc.abstractmethod
    def record(self, body: Callable[[Callable[[int], None]], T], pool: Pool) -> tuple[RecordedGraph, T]:
        """Run ``body(mark)`` with its device work recorded instead of done; memory comes from ``pool``.

        ``body`` calls ``mark(i)`` before operation ``i``. Raises CaptureError when the device refuses, in which
        case nothing stays recorded and the device works on.
        """

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run as `record` will, but for real, so that libraries allocate and choose their kernels beforehand."""
        run()

    @abc.abstractmethod
    def tensor_at(
        self, address: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor over memory that somebody else owns and keeps alive."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all work on the device is done."""

    @abc.abstractmethod
    def random_state(self) -> Any:
        """The state of the device's default generator."""

    @abc.abstractmethod
    def set_random_state(self, state: Any) -> None:
        """Put the default generator back into a state that ``random_state`` gave."""

    @abc.abstractmethod
    def allocated_total(self) -> int:
        """Bytes handed out by the allocator since the start, freed ones included; never falls."""

    @abc.abstractmethod
    def live_bytes(self) -> int:
        """Bytes in use by tensors on the device now."""

    @abc.abstractmethod
    def measure(self, run: Callable[[], object]) -> float:
        """Microseconds of one ``run()``, host and device together, the better of the two not hidden.

        On the emulated device this is a model (counted launches, copies and patches times fixed costs), so that
        choices there are the same in every run.
        """
