"""The interface of devices to the runtime: recording a graph, memory, waiting, times.

Everything above this interface (discovery, proof, memory, execution) is the same code on every device.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from pygraph.errors import CaptureError
from pygraph.ir.python_draws import PythonStates, are_drawn
from pygraph.runtime.graph_generators import GraphGenerator, SavedStates
from pygraph.runtime.recorded_graph import RecordedGraph
from pygraph.runtime.samples import Sample

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of the mechanisms on a device, in microseconds of the host or of the device.

    Attributes:
        replay: Host: one replay.
        host_node: Host: sending one node.
        update: Device: the node that updates others.
        update_word: Device: each pointer that it writes into another node.
        table: Device: the node that fills the table.
        load: Device: each pointer loaded from the table.
        copy: Device: the node that copies.
        copy_rate: Bytes that it copies in a microsecond.
        allocation: Host: allocating one result, whatever the mechanism.
        upload: Device: each node that was sent since the last replay.
        launch: Host: each kernel of ordinary launches by operations of torch's.
    """

    replay: float
    host_node: float
    update: float
    update_word: float
    table: float
    load: float
    copy: float
    copy_rate: float
    allocation: float = 0.0
    upload: float = 0.0
    launch: float = 8.0


@dataclasses.dataclass(frozen=True)
class Run:
    """A function to measure that starts from the same state however often it is called.

    Attributes:
        timed: The function that is measured.
        restore: Undoes the changes of ``timed``, on the current stream; None if it changes nothing.
        way: The way of running that it is, as reports call it.
    """

    timed: Callable[[], object]
    restore: Callable[[], object] | None = None
    way: str = ""

    def prepare(self) -> None:
        """Undo the changes of earlier runs; called before `timed`, and not measured."""
        if self.restore is not None:
            self.restore()

    def __call__(self) -> object:
        """Prepare and run, for timers that call one function."""
        self.prepare()
        return self.timed()


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """One kernel, or one copy or fill of memory, as it was measured.

    Attributes:
        op: The number of the operation that has launched it.
        name: The kernel's name.
        us: The microseconds that it took.
    """

    op: int
    name: str
    us: float


class InterruptedCaptureError(CaptureError):
    """Something beside what is captured ended the capture, as a wait for the device in another thread."""


def patiently(attempt: Callable[[], T], pauses: Sequence[float] = (0.0, 0.0)) -> T:
    """The result of ``attempt()``, called again, after these seconds, as often as something interrupts its capture.

    By default without a pause, and not for long: an operation of the user's may interrupt it every time.
    """
    for seconds in pauses:
        try:
            return attempt()
        except InterruptedCaptureError:
            time.sleep(seconds)
    return attempt()


class Pool(abc.ABC):
    """Private memory that recordings of one function share; replays on it are ordered one after another."""

    def __init__(self) -> None:
        #: The graphs that are replayed on it.
        self.graphs = weakref.WeakSet[RecordedGraph]()
        #: Address and size of memory that was given back since the last recording, and to which no graph writes.
        self.unwritten: list[tuple[int, int]] = []

    @abc.abstractmethod
    def segments(self) -> list[tuple[int, int]]:
        """Address and size of the pieces of the device's memory that the pool holds."""

    def nbytes(self) -> int:
        """Bytes that the pool holds of the device's memory."""
        return sum(size for _, size in self.segments())

    def taken(self) -> list[tuple[int, int]]:
        """Address and size of the pieces of which its graphs may use any part."""
        found = self.segments() if self.graphs else []
        for start, size in self.unwritten:
            found = [part for piece in found for part in _without(piece, start, start + size)]
        return found

    @abc.abstractmethod
    def order(self) -> None:
        """Make work on the current stream wait for the pool's last replay, if that was on another stream."""

    def end_use(self, graph: RecordedGraph) -> None:
        """Note that a graph is not replayed any more."""
        self.graphs.discard(graph)

    def is_blocked(self) -> bool:
        """Whether nothing can wait for the last replay now, because its stream is being captured."""
        return False


def _without(piece: tuple[int, int], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of a piece of memory before and behind these addresses.

    >>> _without((100, 50), 110, 120), _without((100, 50), 90, 120), _without((100, 50), 150, 160)
    ([(100, 10), (120, 30)], [(120, 30)], [(100, 50)])
    """
    first, last = piece[0], sum(piece)
    parts = [(first, min(start, last)), (max(end, first), last)]
    return [(begin, stop - begin) for begin, stop in parts if begin < stop] if start < last and first < end else [piece]


@dataclasses.dataclass
class Counters:
    """Counts of what a driver has done since it was made. A graph replay counts as one launch."""

    launches: int = 0
    copies: int = 0
    copied_bytes: int = 0
    synchronizations: int = 0
    captures: int = 0
    replays: int = 0
    patches: int = 0


_replay_sources: list[Callable[[], None]] = []


def add_replay_source(count: Callable[[], None]) -> None:
    """Have ``count()`` called before counters are read: it adds replays that were made without the driver."""
    _replay_sources.append(count)


def count_native_replays() -> None:
    """Bring the counters of all drivers up to date with replays that were made without them."""
    for count in _replay_sources:
        count()


class Driver(abc.ABC):
    """A device: recording, memory, waiting, timing."""

    device: torch.device
    counters: Counters

    @abc.abstractmethod
    def new_pool(self, *, lasting: bool = True) -> Pool:
        """A fresh, empty memory pool; one that does not last is for a single recording."""

    @abc.abstractmethod
    def record(
        self, body: Callable[[Callable[[int], None]], T], pool: Pool, generators: Sequence[GraphGenerator] = ()
    ) -> tuple[RecordedGraph, T]:
        """Run ``body(mark)`` with its device work recorded instead of done; memory comes from ``pool``.

        Random numbers come from the default generator, or from those of ``generators``, which serve no other recording.
        ``body`` calls ``mark(i)`` before operation ``i``. Raises CaptureError when the device refuses, in which
        case nothing stays recorded and the device works on.
        """

    @abc.abstractmethod
    def branch(self, predicate: torch.Tensor, parts: Sequence[Callable[[], object]]) -> None:
        """Record a node that does the first part if the predicate is true, and else the second."""

    @abc.abstractmethod
    def loop(self, predicate: torch.Tensor, part: Callable[[], torch.Tensor]) -> None:
        """Record a node that repeats a part, which returns the next predicate, as long as that is true."""

    def native_stream(self) -> tuple[Callable[[int], int], int] | None:
        """Functions for native replays: the current raw stream of a device, ``is_capturing(stream, int *status)``.

        None if they are not possible.
        """
        return None

    def refusal(self) -> str | None:
        """The reason why nothing can be recorded on the device as it is set up now; None if there is none."""
        return None

    def unwatched(self) -> AbstractContextManager[object]:
        """A block in which the device may be waited for also where the user has errors raised for that."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def give_back(self) -> None:
        """Return memory that the allocator has cached to the device, as that of pools whose graphs are gone."""

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run as `record` will, but for real, so that libraries allocate and choose their kernels beforehand."""
        return run()

    @abc.abstractmethod
    def tensor_at(
        self, address: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor over memory that other code owns and keeps alive."""

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
    def costs(self) -> Costs:
        """The times of the mechanisms on this device."""

    @abc.abstractmethod
    def replay_time(self, graph: RecordedGraph, restore: Callable[[], object] | None = None) -> float:
        """Microseconds that the device needs for a replay, which is run a few times.

        Args:
            graph: The graph.
            restore: Called before each replay, outside of what is timed; None for a graph that changes nothing.
        """

    @property
    def is_exact(self) -> bool:
        """Whether `sample` gives the same at every run, as it is a model."""
        return False

    @abc.abstractmethod
    def sample(self, run: Run, *, latency: bool = False) -> Sample:
        """The times of one run, of the host and of the device apart; it may run several times for that.

        On the emulated device this is a model (counted launches, copies and patches times fixed costs), so that
        choices there are the same in every run.

        Args:
            run: Only its part ``timed`` counts.
            latency: Whether to measure the time until the result is there, too.
        """

    @abc.abstractmethod
    def kernel_times(
        self, run: Callable[[Callable[[int], None]], object], restore: Callable[[], object], count: int
    ) -> list[list[KernelTime]]:
        """The kernels of runs with ordinary launches, in the order in which they were launched.

        Args:
            run: Launches the kernels; it calls the function that it is passed with the number of each operation before
                that operation.
            restore: Called before each run; its kernels do not count.
            count: The number of runs, after one that loads what runs need.

        Returns:
            The kernels of each run; none if the device cannot tell.
        """

    @property
    @abc.abstractmethod
    def kernel_clock(self) -> str:
        """How `kernel_times` measures, for reports."""

    def others(self) -> str | None:
        """Signs that other processes keep the device busy; None if there are none, or that cannot be known."""
        return None

    def identity(self) -> tuple[str, ...] | None:
        """Names and versions on which measurements depend; None if there is no use in remembering them."""
        return None


class RandomStates:
    """The present states of the generators of the host, of devices, and of others, to which they can be put back."""

    def __init__(self, drivers: Iterable[Driver], generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = tuple(generators)
        self._states = [(driver, driver.random_state()) for driver in drivers]
        self._host, self._others = torch.get_rng_state(), SavedStates(self._generators)
        self._python = PythonStates() if are_drawn() else None

    def now(self) -> RandomStates:
        """The states of the same generators as they are now."""
        return RandomStates([driver for driver, _ in self._states], self._generators)

    def restore(self) -> None:
        """Put the generators back."""
        for driver, state in self._states:
            driver.set_random_state(state)
        torch.set_rng_state(self._host)
        self._others.restore()
        if self._python is not None:
            self._python.restore()


@contextlib.contextmanager
def random_states_restored(
    driver: Driver | None, generators: Iterable[torch.Generator] = ()
) -> Generator[None, None, None]:
    """Have the random generators of the host, of a device if there is one, and others as they are now afterwards."""
    states = RandomStates(() if driver is None else (driver,), generators)
    try:
        yield
    finally:
        states.restore()
