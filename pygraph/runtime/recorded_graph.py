"""The interface of recorded graphs to the runtime: their nodes' parameter bytes, patching, added nodes, replay."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

from pygraph.errors import CaptureError
from pygraph.ir.selections import Mechanism
from pygraph.runtime.graph_generators import GraphGenerator

NodeMechanism = Literal["host", "device", "table"]
"""Ways in which the pointers of one node can change: the host changes its parameters; a node at the graph's start does;
or the kernel loads them from a table that such a node fills."""


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
class NativeCommit:
    """A call that sends a node from native code: ``function(executable, node, params)``.

    If ``context`` is not zero it is a fourth argument.
    """

    function: int
    executable: int
    node: int
    params: int
    context: int


class LaunchInPython(NamedTuple):
    """The replay of a graph that Python must prepare: whether that is possible now, and then whether it was done."""

    is_ready: Callable[[], bool]
    launch: Callable[[], bool]


class RecordedGraph(abc.ABC):
    """A recorded graph that can be patched and replayed."""

    nodes: tuple[RecordedNode, ...]
    draws: bool = False
    """Whether it draws random numbers from the device's generator."""
    generators: tuple[GraphGenerator, ...] = ()
    """The generators that it draws from besides, and those of callers that they stand for."""
    failed: bool = False
    """Whether a kernel of the last replay raised an error in it, as no kernel of a real device can."""

    def mechanisms(self, node: int, request: Mechanism = "auto") -> frozenset[NodeMechanism]:
        """The ways in which that node's pointers can be changed: ``host``, ``device``, ``table``.

        Args:
            node: The node.
            request: The mechanism that the user asks for; one that takes long to prepare is offered only then.
        """
        return frozenset({"host"})

    def why_not_loaded(self, node: int) -> str | None:
        """Why that node cannot load its pointers from a table, if it is of a kind that can."""
        return None

    def wire(self, wiring: Wiring) -> list[list[tuple[int, int]]]:
        """Add nodes of our own, once; the writable copies must be those of the recording.

        Returns:
            Per value, the ``(node, offset)`` parameter bytes of added nodes that hold it: `commit` sends those.

        Raises:
            CaptureError: A node does not allow it. The graph cannot be used any more, only released.
        """
        raise CaptureError("graphs of this device take no nodes of our own")

    def annotate(self, note: Callable[[int], dict[str, str]]) -> None:
        """Have profilers say of each node what ``note`` says of its operation, where that is possible."""
        del note

    def native_commit(self, node: int) -> NativeCommit | None:
        """The call that sends that node from native code; None if there is none."""
        return None

    def native_launch(self) -> tuple[int, int] | LaunchInPython | None:
        """The replay from native code: ``function(executable, stream)`` of ``(function, executable)``, or functions of
        Python; None if there is none.
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
