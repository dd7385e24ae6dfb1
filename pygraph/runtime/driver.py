"""What the runtime needs of a device: recording a graph, its nodes' parameter bytes, patching, replay, memory.

Everything above this interface (discovery, proof, memory, execution) is the same code on every device.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from pygraph.errors import CaptureError
from pygraph.ir.descriptors import Mechanism

T = TypeVar("T")

NodeMechanism = Literal["host", "device", "table"]
"""How the pointers of one node can change: the host changes its parameters; a node at the graph's start does; the
kernel loads them from a table that such a node fills."""


@dataclasses.dataclass(frozen=True)
class NativeCommit:
    """How native code sends a node: ``function(executable, node, params)``, and ``context`` if it is not zero."""

    function: int
    executable: int
    node: int
    params: int
    context: int


class LaunchInPython(NamedTuple):
    """How a graph is replayed that Python must prepare: whether that can be done now, and then whether it was."""

    is_ready: Callable[[], bool]
    launch: Callable[[], bool]


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


@dataclasses.dataclass(frozen=True)
class Wiring:
    """Work of our own to add to a graph: nodes at its start that patch and copy, and at its end that copy.

    Their parameters hold ``values`` addresses, which the host changes instead of those of the graph's own nodes.

    Attributes:
        values: How many addresses.
        updates: ``(value, node, offset)``: before anything else, value is written over that node's parameter bytes.
        loads: ``(value, node, offset)``: the node loads its pointer from a table, in which value is.
        copies_in: ``(value, target, nbytes)``: before anything else, bytes at value are copied to a fixed address.
        copies_out: ``(value, source, nbytes)``: after everything, bytes at a fixed address are copied to value.
    """

    values: int
    updates: tuple[tuple[int, int, int], ...] = ()
    loads: tuple[tuple[int, int, int], ...] = ()
    copies_in: tuple[tuple[int, int, int], ...] = ()
    copies_out: tuple[tuple[int, int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of what is measured. Each starts from the same state, however often it is called.

    Attributes:
        timed: What is measured.
        restore: Puts back what it changes, on the current stream; None if it changes nothing.
    """

    timed: Callable[[], object]
    restore: Callable[[], object] | None = None

    def prepare(self) -> None:
        """Put back what earlier runs have changed; before `timed`, and no part of what it takes."""
        if self.restore is not None:
            self.restore()

    def __call__(self) -> object:
        """Both, for timers that know of no parts."""
        self.prepare()
        return self.timed()


class InterruptedCaptureError(CaptureError):
    """Something beside what is captured ended the capture, as a wait for the device in another thread."""


def patiently(attempt: Callable[[], T], pauses: Sequence[float]) -> T:
    """What ``attempt`` returns; it is made again, after these seconds, as often as something interrupts its capture."""
    for seconds in pauses:
        try:
            return attempt()
        except InterruptedCaptureError:
            time.sleep(seconds)
    return attempt()


class RecordedGraph(abc.ABC):
    """A recorded graph that can be patched and replayed."""

    nodes: tuple[RecordedNode, ...]
    draws: bool = False
    """Whether it draws random numbers from the device's generator."""
    failed: bool = False
    """Whether a kernel of the last replay raised an error in it, as no kernel of a real device can."""

    def mechanisms(self, node: int, request: Mechanism = "auto") -> frozenset[NodeMechanism]:
        """How that node's pointers can be changed: by the ``host``, by the ``device``, through a ``table``.

        Args:
            node: The node.
            request: What the user asks for; what takes long to prepare is offered only then.
        """
        return frozenset({"host"})

    def why_not_loaded(self, node: int) -> str | None:
        """Why that node cannot load its pointers from a table, if it is of a kind that can."""
        return None

    def wire(self, wiring: Wiring) -> list[list[tuple[int, int]]]:
        """Add nodes of our own, once; the writable copies must hold what was recorded.

        Returns:
            Per value, the ``(node, offset)`` parameter bytes of added nodes that hold it: `commit` sends those.

        Raises:
            CaptureError: A node does not allow it. The graph cannot be used any more, only released.
        """
        raise CaptureError("graphs of this device take no nodes of our own")

    def native_commit(self, node: int) -> NativeCommit | None:
        """How native code sends that node; None if it cannot."""
        return None

    def native_launch(self) -> tuple[int, int] | LaunchInPython | None:
        """How native code replays: ``function(executable, stream)`` of ``(function, executable)``, or by functions in
        Python; None if it does not.
        """
        return None

    @abc.abstractmethod
    def params_address(self, node: int) -> int:
        """Address of a writable copy of that node's ``params`` bytes, same length; ``commit`` sends it."""

    @abc.abstractmethod
    def commit(self, node: int) -> None:
        """Make the writable copy of that node's parameters those of the next replay."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Make the writable copies and the next replay those of the recording, whatever was sent or refused."""

    @abc.abstractmethod
    def replay(self) -> None:
        """Launch the graph on the current stream."""

    @abc.abstractmethod
    def release(self, *keep: object) -> None:
        """Give back the graph and its hold on the pool; calling it again does nothing.

        That may wait for replays that still run, or be put off while something is captured; ``keep``, which replays
        use, is held until it is done.
        """


class Pool(abc.ABC):
    """Private memory that recordings of one function share; replays on it are ordered one after another."""

    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that the pool holds of the device's memory."""

    @abc.abstractmethod
    def order(self) -> None:
        """Make work on the current stream wait for the pool's last replay, if that was on another stream."""

    def is_blocked(self) -> bool:
        """Whether nothing can wait for the last replay now, because its stream is being captured."""
        return False


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


_replay_sources: list[Callable[[], None]] = []


def add_replay_source(count: Callable[[], None]) -> None:
    """Have ``count()`` called before counters are read: it adds replays that were made without the driver."""
    _replay_sources.append(count)


def count_native_replays() -> None:
    """Bring the counters of all drivers up to date with replays that were made without them."""
    for count in _replay_sources:
        count()


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

    def native_stream(self) -> tuple[Callable[[int], int], int] | None:
        """For native replays: the raw current stream by device index, and ``is_capturing(stream, int *status)``.

        None if they are not possible.
        """
        return None

    def refusal(self) -> str | None:
        """Why nothing can be recorded on the device as it is set up now; None if nothing speaks against it."""
        return None

    def unwatched(self) -> AbstractContextManager[object]:
        """A block in which the device may be waited for also where the user has errors raised for that."""
        return contextlib.nullcontext()

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run as `record` will, but for real, so that libraries allocate and choose their kernels beforehand."""
        return run()

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
    def costs(self) -> Costs:
        """What the mechanisms cost here."""

    @abc.abstractmethod
    def replay_time(self, graph: RecordedGraph, restore: Callable[[], object] | None = None) -> float:
        """Microseconds that the device needs for a replay, which is run a few times.

        Args:
            graph: The graph.
            restore: Called before each replay, outside of what is timed; None for a graph that changes nothing.
        """

    @abc.abstractmethod
    def measure(self, run: Callable[[], object]) -> float:
        """Microseconds of one ``run()``, host and device together, the better of the two not hidden.

        It is run several times. Of a `Run` only the part ``timed`` counts.

        On the emulated device this is a model (counted launches, copies and patches times fixed costs), so that
        choices there are the same in every run.
        """
