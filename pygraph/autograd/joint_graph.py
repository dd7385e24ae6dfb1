"""Joint graphs: Programs of a function's results and gradients, and which of their nodes belong to the forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from pygraph.autograd.value_numbering import ValueNumbering
from pygraph.errors import TraceError, describe
from pygraph.ir.decisions import decisions_among
from pygraph.ir.descriptors import Mutation, Output, Result
from pygraph.ir.program import Program
from pygraph.lowering.states import settle_program

COTANGENT = torch.ops.pygraph.cotangent.default
"""The operation that stands for the gradient of a result."""


class JointGraph:
    """A Program whose result is ``(result, gradients)``, with the facts by which it is partitioned.

    Args:
        joint: The Program.
        numbering: The value numbers of all traces of the function.

    Attributes:
        program: The Program.
        value_number: The value number of each node.
        result_tree: The structure of ``result``.
        gradients_tree: The structure of ``gradients``.
        result_leaves: How many leaves ``result`` has.
        backward_nodes: The nodes that autograd computes in the backward.
        written: The inputs that the function updates, by number.
        descriptor_of: The descriptor of each placeholder.
        input_number: The number of each placeholder.
        returned: The nodes that are results, and of which leaf.

    Raises:
        TraceError: The forward's effects depend on a gradient.
    """

    def __init__(self, joint: Program, numbering: ValueNumbering) -> None:
        self.program = joint = settle_program(joint)  # its parts may be graphs of their own
        self.value_number = numbering.of(joint)
        # No container is made of numbers: a class may look at what it holds, as PackedSequence does.
        self.result_tree, self.gradients_tree = joint.out_tree.children()
        self.result_leaves = self.result_tree.num_leaves
        self._bases_of_results = {a.index for a in joint.aliases if a.of == "output" and not self.is_gradient(a.leaf)}
        self.backward_nodes = self._find_backward_nodes()
        self.written = {d.input for d in joint.outputs if isinstance(d, Mutation)}
        self.descriptor_of = dict(zip(joint.placeholders, joint.inputs, strict=True))
        self.input_number = {node: number for number, node in enumerate(joint.placeholders)}
        self.returned: dict[fx.Node, int] = {}
        for descriptor, value in zip(joint.outputs, joint.results, strict=True):
            if isinstance(descriptor, Result) and 0 <= descriptor.leaf < self.result_leaves:
                self.returned.setdefault(value, descriptor.leaf)

    def is_gradient(self, leaf: int) -> bool:
        """Whether a leaf of the joint result is a gradient."""
        return leaf >= self.result_leaves

    def is_forward_output(self, number: int, descriptor: Output) -> bool:
        """Whether an output is the forward's: an update, a result, or memory that results share."""
        if isinstance(descriptor, Result):
            return number in self._bases_of_results or 0 <= descriptor.leaf < self.result_leaves
        return isinstance(descriptor, Mutation)

    def forward_values(self) -> list[fx.Node]:
        """Return the nodes that the forward returns or writes to its inputs."""
        outputs = enumerate(zip(self.program.outputs, self.program.results, strict=True))
        return [value for number, (descriptor, value) in outputs if self.is_forward_output(number, descriptor)]

    def forward_numbers(self) -> frozenset[int]:
        """Return the value numbers of `forward_values`, which are equal for equal forwards."""
        return frozenset(self.value_number[value] for value in self.forward_values())

    def error(self, problem: str, node: fx.Node | None = None, remedy: str | None = None) -> TraceError:
        """Return an error that says why the Program cannot be partitioned, at the line of a node."""
        source = None if node is None else node.meta.get("source")
        return TraceError(describe(f"{self.program.name}(…)", problem, source=source, remedy=remedy))

    def _find_backward_nodes(self) -> set[fx.Node]:
        """Find all nodes from the first cotangent on that no result needs."""
        nodes = self.program.nodes[:-1]
        first = next((number for number, node in enumerate(nodes) if node.target is COTANGENT), len(nodes))
        dependent: set[fx.Node] = set()
        for node in nodes:
            if node.target is COTANGENT or any(source in dependent for source in node.all_input_nodes):
                dependent.add(node)
        forward = with_dependencies(self.forward_values())
        if forward & dependent:
            raise self.error("a tensor that it updates or returns depends on a gradient")
        if decisions_among(nodes[first:]):
            raise self.error("its backward decides by values on the device")
        return set(nodes[first:]) - forward


def with_dependencies(values: Iterable[Any]) -> set[fx.Node]:
    """Return the nodes among values, and all nodes that these depend on."""
    found: set[fx.Node] = set()
    queue = list(values)
    while queue:
        node = queue.pop()
        if isinstance(node, fx.Node) and node not in found:
            found.add(node)
            queue += node.all_input_nodes
    return found
