"""Conditional nodes of the emulated device's graphs: a replay looks at the predicate, and runs the nodes of a part."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import torch

from pygraph.runtime.emulated.parameters import Operand, operand_at
from pygraph.runtime.emulated.wiring import NodeFunction
from pygraph.runtime.recorded_graph import RecordedNode

Part: TypeAlias = "tuple[tuple[NodeFunction, bytes], ...]"
"""Nodes with their parameters, which stay as they were recorded."""


class Recorded(Protocol):
    """The nodes of a part, in the order in which they run."""

    nodes: list[RecordedNode]
    functions: list[NodeFunction]


@dataclasses.dataclass(frozen=True, eq=False)
class BranchNode:
    """A node that runs one of two parts."""

    predicate: Operand
    parts: tuple[Part, Part]

    def run(self, params: bytes) -> None:
        """Run the part for the predicate whose address is in the bytes."""
        _run(self.parts[0 if bool(self.predicate.read(params, params)) else 1])


@dataclasses.dataclass(frozen=True, eq=False)
class LoopNode:
    """A node that runs a part as long as a predicate is true."""

    predicate: Operand
    following: Operand
    address: bytes
    part: Part

    def run(self, params: bytes) -> None:
        """Run the part, for the predicate whose address is in the bytes, and then for that which each turn gives."""
        goes_on = bool(self.predicate.read(params, params))
        while goes_on:
            _run(self.part)
            goes_on = bool(self.following.read(self.address, self.address))


def _run(part: Part) -> None:
    for function, params in part:
        function.run(params)


def branch_node(predicate: torch.Tensor, parts: Sequence[Recorded], op: int) -> tuple[RecordedNode, NodeFunction]:
    """The node of a branch with its two parts."""
    first, second = map(_part, parts)
    return _node(predicate, op), BranchNode(operand_at(0, predicate), (first, second))


def loop_node(
    predicate: torch.Tensor, part: Recorded, following: torch.Tensor, op: int
) -> tuple[RecordedNode, NodeFunction]:
    """The node of a loop; ``following`` is the predicate that a turn gives."""
    address = struct.pack("<QQ", following.data_ptr(), 0)
    return _node(predicate, op), LoopNode(operand_at(0, predicate), operand_at(0, following), address, _part(part))


def _node(predicate: torch.Tensor, op: int) -> RecordedNode:
    return RecordedNode("conditional", "conditional", op, struct.pack("<QQ", predicate.data_ptr(), 0))


def _part(recorded: Recorded) -> Part:
    return tuple(zip(recorded.functions, (node.params for node in recorded.nodes), strict=True))


def every_function(functions: Sequence[NodeFunction]) -> Iterator[NodeFunction]:
    """Nodes, with those of the parts of branches and loops."""
    for function in functions:
        yield function
        parts = function.parts if isinstance(function, BranchNode) else ()
        for part in (function.part,) if isinstance(function, LoopNode) else parts:
            yield from every_function([inner for inner, _ in part])
