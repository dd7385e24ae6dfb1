"""The backward of a joint graph: a Program of its gradients, and where its arguments come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping
from typing import Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.autograd.joint_graph import COTANGENT, JointGraph
from pygraph.autograd.recomputation import is_recomputed, is_unset_generator_state, zeros_for_generator_state
from pygraph.ir.descriptors import (
    Alias,
    Argument,
    Captured,
    CapturedGenerator,
    Input,
    Result,
    ScalarArgument,
    Static,
    TensorSpec,
)
from pygraph.ir.effects import is_host_number, is_random, is_view, root
from pygraph.ir.program import Program, graph_module
from pygraph.ir.random_states import set_random_state
from pygraph.ir.scopes import came_from
from pygraph.report.remedies import KEEP_SHAPE

Origin = Literal["cotangent", "saved", "result", "argument"]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a backward's argument comes from: a cotangent, a saved value, a result or an argument of the forward.

    Attributes:
        of: The kind of source.
        index: The cotangent's number, the saved value's number, or the leaf of the result or argument.
        spec: The tensor that the Program was traced for; None for a number.
    """

    of: Origin
    index: int
    spec: TensorSpec | None


class NotSavedError(Exception):
    """A backward needs a value that its forward has not saved."""


class BackwardGraph:
    """The backward of a joint graph.

    Args:
        joint: The joint graph.
        available: The values that the backward may take of a forward that has run, by value number; None if the
            forward is still to be made, and saves what is needed.

    Attributes:
        saved: The nodes that the forward must save.
        sources: Where the backward's arguments come from, in order.
        taken: The sources of values, by value number.
        program: The backward.

    Raises:
        NotSavedError: The backward needs a value that is not available.
        TraceError: The backward needs what cannot be saved.
    """

    def __init__(self, joint: JointGraph, available: Mapping[int, Source] | None = None) -> None:
        self._joint = joint
        self._available = available
        self.saved: list[fx.Node] = []
        self.sources: list[Source] = []
        self.taken: dict[int, Source] = {}
        self.program = self._build()

    def captured(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the backward reads where the function closes over them."""
        return tuple(d.value for d in self.program.inputs if isinstance(d, Captured))

    def _build(self) -> Program:
        joint, program = self._joint, self._joint.program
        outputs, aliases, statics = self._gradient_outputs()
        wanted = [program.results[number] for number, _ in outputs]
        needed = self._needed(wanted)
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        inputs = self._inputs(needed)
        given = {node for _, node in inputs}
        for _, node in inputs:
            mapping[node] = graph.placeholder(node.name)
            mapping[node].meta = dict(node.meta)
        for node in program.nodes:
            if node in needed and node not in given:
                zeros = zeros_for_generator_state(node, graph)
                mapping[node] = zeros or graph.node_copy(node, lambda source: mapping[source])
                mapping[node].meta = dict(node.meta)
        graph.output(tuple(_in_own_memory(value, given, graph, mapping) for value in wanted))
        in_tree = pytree.tree_structure((tuple(0 for _ in self.sources), {}))
        out_tree = joint.gradients_tree
        return Program(
            name=f"backward({program.name})", module=graph_module(program.module, graph),
            inputs=tuple(descriptor for descriptor, _ in inputs), outputs=tuple(d for _, d in outputs),
            aliases=tuple(aliases), statics=tuple(statics), in_tree=in_tree, out_tree=out_tree,
            stage="aten", history=(*program.history, "partition"),
        )  # fmt: skip

    def _gradient_outputs(self) -> tuple[list[tuple[int, Result]], list[Alias], list[Static]]:
        """Return the joint graph's outputs that gradients need, by number, and the rest of the gradients' leaves."""
        joint, program = self._joint, self._joint.program
        first = joint.result_leaves
        of_gradients = [alias for alias in program.aliases if joint.is_gradient(alias.leaf)]
        hidden = {alias.index for alias in of_gradients if alias.of == "output"}
        outputs: list[tuple[int, Result]] = []
        number_of: dict[int, int] = {}
        for number, descriptor in enumerate(program.outputs):
            if not isinstance(descriptor, Result):
                continue
            if joint.is_gradient(descriptor.leaf) or number in hidden:
                number_of[number] = len(outputs)
                leaf = descriptor.leaf - first if descriptor.leaf >= 0 else -1
                outputs.append((number, dataclasses.replace(descriptor, leaf=leaf)))
        aliases: list[Alias] = []
        for alias in of_gradients:
            if alias.of == "output":
                index = number_of[alias.index]
            elif alias.of == "result" and joint.is_gradient(alias.index):
                index = alias.index - first
            else:
                raise joint.error("a gradient is an argument or a result of the forward")
            aliases.append(dataclasses.replace(alias, leaf=alias.leaf - first, index=index))
        statics = [
            dataclasses.replace(static, leaf=static.leaf - first)
            for static in program.statics
            if joint.is_gradient(static.leaf)
        ]
        return outputs, aliases, statics

    def _needed(self, wanted: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the nodes that the backward has, as inputs or computed there."""
        needed: set[fx.Node] = set()
        queue = [*wanted, *filter(_moves_generator, self._joint.backward_nodes)]
        while queue:
            node = queue.pop()
            if node in needed:
                continue
            needed.add(node)
            if node.target is COTANGENT or is_unset_generator_state(node):
                continue
            if node in self._joint.backward_nodes or is_recomputed(self._joint, node):
                queue += node.all_input_nodes
        return needed

    def _inputs(self, needed: Container[fx.Node]) -> list[tuple[Input, fx.Node]]:
        """Return the backward's inputs, each with the node of the joint graph whose value it is."""
        joint = self._joint
        nodes = joint.program.nodes
        cotangents = {node.args[1]: node for node in nodes if node.target is COTANGENT}
        inputs: list[tuple[Input, fx.Node]] = []
        for index, node in sorted(cotangents.items()):  # pyright: ignore
            inputs.append((self._argument("cotangent", index, node), node))  # pyright: ignore
        given = [n for n in nodes if n in needed and n not in joint.backward_nodes and not is_recomputed(joint, n)]
        for node in sorted(given, key=is_host_number):  # numbers are passed after tensors
            inputs.append((self._input(node), node))
        return inputs

    def _input(self, node: fx.Node) -> Input:
        """Return the backward's input for a value of the forward."""
        joint = self._joint
        descriptor = joint.descriptor_of.get(node)
        if descriptor is not None and joint.input_number[node] not in joint.written:
            if isinstance(descriptor, (Captured, CapturedGenerator)):
                return descriptor
            if isinstance(descriptor, Argument):
                return self._argument("argument", descriptor.leaf, node)
            if isinstance(descriptor, ScalarArgument):
                position = len(self.sources)
                self.sources.append(Source("argument", descriptor.leaf, None))
                return ScalarArgument(f"args[{position}]", position, descriptor.type)
        number = joint.value_number[node]
        if self._available is not None:
            if number not in self._available:
                raise NotSavedError
            source = self._available[number]
            return self._argument(source.of, source.index, node)
        if node in joint.returned:
            return self._argument("result", joint.returned[node], node)
        if node not in self.saved:
            self.saved.append(node)
        return self._argument("saved", self.saved.index(node), node)

    def _argument(self, of: Origin, index: int, node: fx.Node) -> Argument:
        spec = node.meta["spec"]
        if not isinstance(spec, TensorSpec):
            raise self._joint.error("its backward needs a value whose shape depends on data", node, KEEP_SHAPE)
        spec = dataclasses.replace(spec, offset=0)
        position = len(self.sources)
        self.sources.append(Source(of, index, spec))
        self.taken[self._joint.value_number[node]] = self.sources[-1]
        return Argument(f"args[{position}]", position, spec)


def _moves_generator(node: fx.Node) -> bool:
    """Whether a node draws random numbers or sets a generator back, as a checkpoint does when it is recomputed."""
    return is_random(node) or node.target is set_random_state()


def _in_own_memory(
    value: fx.Node, given: Container[fx.Node], graph: fx.Graph, mapping: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """Return a gradient in memory of its own: a copy where it is an input of the backward or a view of one."""
    if root(value) not in given:
        return mapping[value]
    views: list[fx.Node] = []
    while is_view(value):
        views.append(value)
        value = value.args[0]  # pyright: ignore[reportAssignmentType]
    copied = graph.call_function(torch.ops.aten.clone.default, (mapping[value],))
    copied.meta = {"spec": dataclasses.replace(value.meta["spec"], offset=0), **came_from(value)}
    for view in reversed(views):
        inner, source = copied, view.args[0]
        copied = graph.node_copy(
            view, lambda node, inner=inner, source=source: inner if node is source else mapping[node]
        )
        copied.meta = dict(view.meta)
    return copied
