"""Joint graphs of forward and backward, split where ``torch.compile`` would split them.

Inductor makes better kernels of the two halves than of the whole: the backward is compiled for the layouts that the
forward has chosen for saved tensors, and computes again what is cheaper to compute than to load. The minimum cut that
decides which tensors are saved is torch's.
"""

# The partitioner is private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from pygraph.ir.effects import root
from pygraph.ir.program import graph_module, output_values

aten = torch.ops.aten


class Value(NamedTuple):
    """A value that one of the halves takes or returns.

    Attributes:
        of: Where it comes from: the inputs of the joint graph, the results of the forward, or those of the backward.
        number: Its position there.
    """

    of: Literal["input", "forward", "backward"]
    number: int


@dataclasses.dataclass(frozen=True, eq=False)
class Halves:
    """A forward and its backward; updates of inputs are ``copy_`` at their ends.

    Attributes:
        forward: Takes the ``forward_inputs``; returns results of the joint graph, then saved tensors.
        backward: Takes saved tensors, inputs and the gradients that it begins with; returns results of the joint graph.
        forward_inputs: The inputs of the joint graph that the forward takes, in order.
        backward_inputs: Inputs of the joint graph and results of the forward.
        results: For each result of the joint graph, where it is.
        visible: The number of the forward's results that are results of the joint graph.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_inputs: tuple[int, ...]
    backward_inputs: tuple[Value, ...]
    results: tuple[Value, ...]
    visible: int


def split(module: fx.GraphModule, begins: Collection[int], static: Collection[int]) -> Halves | None:
    """Split a graph in all that is known before a backward begins, and the rest.

    IR before, where ``ones`` is the gradient that the backward begins with::

        sin = aten.sin.default(x)
        loss = aten.sum.default(sin)
        mul = aten.mul.Tensor(expand(ones), aten.cos.default(x))
        copy_ = aten.copy_.default(x, mul)
        return (loss,)

    IR after, forward and backward::

        sin = aten.sin.default(x)
        loss = aten.sum.default(sin)
        return (loss,)

        mul = aten.mul.Tensor(expand(ones), aten.cos.default(x))
        copy_ = aten.copy_.default(x, mul)
        return ()

    Args:
        module: A functional graph of decomposed ATen operations but for updates of inputs, ``copy_`` at its end.
        begins: Positions of the inputs that backwards begin with.
        static: Positions of the inputs that are there before and after, as parameters: to save them costs nothing.

    Returns:
        The halves; None if one of them computes nothing, or the graph has updates that something reads.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    joint = _Joint(module, begins)
    if joint.is_one_sided:
        return None
    primals = [index for index in range(joint.count) if index not in begins]
    forward, backward = min_cut_rematerialization_partition(
        joint.module,
        None,
        compiler="inductor",
        num_fwd_outputs=len(joint.early),
        static_lifetime_input_indices=[position for position, index in enumerate(primals) if index in static],
    )
    return _Assembly(joint, forward, backward).halves(primals)


class _Joint:
    """A copy of a graph as the partitioner wants it: inputs with telling names, all updates among the results.

    Attributes:
        module: The copy. It returns ``early`` and ``late`` values.
        count: The number of inputs.
        early: What is computed before a backward begins: positions of results, or inputs that are updated.
        late: The same of what is computed afterwards.
        is_one_sided: Whether there is nothing to split, or an update that something reads.
    """

    def __init__(self, module: fx.GraphModule, begins: Collection[int]) -> None:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        after: set[fx.Node] = set()
        wanted: list[tuple[Value, Any]] = []
        inputs: list[fx.Node] = []
        self.is_one_sided = False
        for node in module.graph.nodes:
            if node.op == "output":
                continue
            if _is_update(node):
                wanted.append((Value("input", inputs.index(node.args[0])), node.args[1]))
                self.is_one_sided |= bool(node.users)
                continue
            if node.op == "placeholder":
                is_first = len(inputs) in begins
                copies[node] = graph.placeholder(f"{'tangents' if is_first else 'primals'}_{len(inputs)}")
                inputs.append(node)
            else:
                is_first = False
                copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
            if is_first or any(argument in after for argument in node.all_input_nodes):
                after.add(node)
        wanted += [(Value("backward", position), value) for position, value in enumerate(output_values(module.graph))]
        early = [(what, value) for what, value in wanted if value not in after]
        late = [(what, value) for what, value in wanted if value in after]
        graph.output(tuple(copies.get(value, value) for _, value in (*early, *late)))
        self.early, self.late = [what for what, _ in early], [what for what, _ in late]
        self.is_one_sided |= not early or not late
        self.count = len(inputs)
        self.module = graph_module(module, graph)


def _is_update(node: fx.Node) -> bool:
    target: Any = node.args[0] if node.target is aten.copy_.default else None
    return isinstance(target, fx.Node) and target.op == "placeholder"


class _Assembly:
    """Puts updates back in halves, and finds out which values they exchange."""

    def __init__(self, joint: _Joint, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        self._joint = joint
        self._forward, self._backward = forward, backward
        self._read = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
        self._computed = {node.name: node for node in forward.graph.nodes}
        #: Memory of the forward's that the backward reads, also through a view.
        self._shared = {root(self._computed[name]) for name in self._read if name in self._computed}

    def halves(self, primals: Sequence[int]) -> Halves:
        """The halves."""
        joint, results = self._joint, dict[int, Value]()
        values = output_values(self._forward.graph)[: len(joint.early)]
        returned: list[fx.Node] = []
        postponed: list[tuple[int, fx.Node]] = []
        for what, value in zip(joint.early, values, strict=True):
            if what.of == "backward":
                results[what.number] = Value("forward", len(returned))
                returned.append(value)
            elif self._computed[f"primals_{what.number}"] in self._shared:  # the backward needs the old contents
                postponed.append((what.number, value))
            else:
                _update(self._forward.graph, self._computed[f"primals_{what.number}"], value)
        visible = len(returned)
        for index, value in postponed:
            _update(self._backward.graph, self._input(index), self._saved(value))
        kept: list[fx.Node] = []
        for what, value in zip(joint.late, output_values(self._backward.graph), strict=True):
            if what.of == "backward":
                results[what.number] = Value("backward", len(kept))
                kept.append(value)
            else:
                _update(self._backward.graph, self._input(what.number), value)
        sources: list[Value] = []
        for node in self._backward.graph.find_nodes(op="placeholder"):
            kind, _, number = node.name.rpartition("_")
            if kind in ("primals", "tangents"):
                sources.append(Value("input", int(number)))
                continue
            saved = self._computed[node.name]
            if saved not in returned:
                returned.append(saved)
            sources.append(Value("forward", returned.index(saved)))
        _return(self._forward, returned)
        _return(self._backward, kept)
        every = tuple(results[position] for position in range(len(results)))
        return Halves(self._forward, self._backward, tuple(primals), tuple(sources), every, visible)

    def _input(self, index: int) -> fx.Node:
        """An input of the joint graph in the backward."""
        return self._saved(self._computed[f"primals_{index}"])

    def _saved(self, value: fx.Node) -> fx.Node:
        """A value of the forward in the backward."""
        if value.name not in self._read:
            graph = self._backward.graph
            with graph.inserting_before(next(iter(graph.nodes))):
                self._read[value.name] = graph.placeholder(value.name)
            self._read[value.name].meta = dict(value.meta)
        return self._read[value.name]


def _update(graph: fx.Graph, target: fx.Node, value: fx.Node) -> None:
    with graph.inserting_before(graph.output_node()):
        copy = graph.call_function(aten.copy_.default, (target, value))
    copy.meta = {"val": target.meta["val"]}


def _return(module: fx.GraphModule, values: Sequence[fx.Node]) -> None:
    output = module.graph.output_node()
    output.args = (tuple(values),)
    output.meta = {}
    module.recompile()
