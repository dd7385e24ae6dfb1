"""A graph that Inductor has compiled, specialised: its Program is the list of kernels that Inductor's wrapper launches.

Static inputs become captured tensors of the Program, sizes its constants, and the other tensors its arguments.
"""

# torch's stack of dispatch modes is private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError, describe
from pygraph.guards.environment import Environment
from pygraph.interop.graph_queries import random_draws
from pygraph.interop.specialized import GraphSource, SpecializedGraph
from pygraph.ir.descriptors import (
    Alias,
    Argument,
    Captured,
    Fallback,
    Input,
    Output,
    Result,
    Static,
    TensorSpec,
)
from pygraph.ir.dispatch_modes import no_dispatch_modes
from pygraph.ir.effects import root
from pygraph.ir.leaves import overlap_groups
from pygraph.ir.program import Program, graph_module, output_values
from pygraph.ir.random_draws import drop_links
from pygraph.lowering.inductor import ALIGNED, FusedGraph
from pygraph.lowering.kernel_recorder import KernelGraph
from pygraph.lowering.spent_memory import reuse_spent_memory
from pygraph.tracing.function_kinds import Traced
from pygraph.transforms.passes import GRAPHIFY, INDIRECT, SELECT


class InductorSource:
    """A graph of Inductor's kernels that can be specialised.

    Args:
        graph: The compiled graph.
        draws: The random draws in the order in which eager makes them.
        otherwise: The source to use if Inductor has put the draws in another order.
    """

    def __init__(self, graph: FusedGraph, draws: Sequence[Any] = (), otherwise: GraphSource | None = None) -> None:
        self._graph = graph
        self._draws = list(draws)
        self._otherwise = otherwise
        self._kernels: _Kernels | None = None

    def draws_in_order(self, inputs: Sequence[Any]) -> bool:
        """Whether kernels for these inputs draw random numbers in the order of eager; False if a size is symbolic.

        The kernels are read off the wrapper on the way; the first specialisation for inputs of these sizes uses them.
        """
        if not sizes_are_known(inputs):
            return False
        with no_dispatch_modes():
            self._kernels = _Kernels.of(self._graph, inputs)
        return random_draws(self._kernels.graph.module.graph) == self._draws

    def specialize(self, inputs: Sequence[Any], static: Sequence[int]) -> SpecializedGraph:
        """Bind the inputs at the positions ``static`` to the tensors that they are now."""
        kernels, self._kernels = self._kernels, None
        specialized = _SpecializedInductorGraph(self._graph, inputs, static, kernels)
        if self._otherwise is not None and specialized.draws != self._draws:
            return self._otherwise.specialize(inputs, static)
        return specialized


def sizes_are_known(inputs: Sequence[Any]) -> bool:
    """Whether no size of the inputs is a symbol, nor an input itself."""
    sizes = (size for value in inputs for size in (value.shape if isinstance(value, torch.Tensor) else (value,)))
    return all(isinstance(size, int) for size in sizes)


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """The kernels of a graph for inputs of some specs, and why they are opaque if they are."""

    specs: list[Any]
    graph: KernelGraph
    note: Fallback | None

    @classmethod
    def of(cls, graph: FusedGraph, inputs: Sequence[Any]) -> _Kernels:
        """The kernels for these inputs."""
        specs = _specs(inputs)
        kernels, note = graph.kernels(specs)
        drop_links(kernels.module.graph)  # its nodes run in this order
        return cls(specs, kernels, note)


def _specs(inputs: Sequence[Any]) -> list[Any]:
    return [TensorSpec.of(value) if isinstance(value, torch.Tensor) else value for value in inputs]


class _SpecializedInductorGraph(SpecializedGraph):
    passes = (INDIRECT, GRAPHIFY, SELECT)

    def __init__(
        self, graph: FusedGraph, inputs: Sequence[Any], static: Sequence[int], kernels: _Kernels | None = None
    ) -> None:
        super().__init__(inputs, static)
        self._graph = graph
        #: The kernels for inputs of the last sizes.
        self._kernels = kernels
        wrapper = self._kernels_for([inputs[index] for index in self.varying]).graph.module.graph
        self.draws = random_draws(wrapper)
        tensors = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        self._plan_results(wrapper, tensors)

    def __call__(self, *args: Any) -> Any:
        results = self._graph(self._all_inputs(args))
        return results if self.assembly is None else [results[index] for index in self._computed]

    def _kernels_for(self, args: Sequence[Any]) -> _Kernels:
        inputs = self._all_inputs(args)
        if self._kernels is None or self._kernels.specs != _specs(inputs):
            self._kernels = _Kernels.of(self._graph, inputs)
        return self._kernels

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        for index, value in enumerate(self._all_inputs(args)):
            if index in self._graph.aligned and value.data_ptr() % ALIGNED:
                raise TraceError(describe(name, f"input {index} does not lie at a multiple of {ALIGNED} bytes"))
        kernels = self._kernels_for(args)
        self._kernels = None
        return Traced(self._program(kernels.graph, kernels.note, args, name), static, Environment(None))

    def _program(self, kernels: KernelGraph, note: Fallback | None, args: Sequence[Any], name: str) -> Program:
        inputs = self._input_descriptors(kernels, args)
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(kernels.module.graph, mapping)
        for old, new in mapping.items():
            new.meta = dict(old.meta)
        spent: list[fx.Node] = []
        for node, descriptor in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta = {"spec": descriptor.spec, "source": None}  # pyright: ignore
            if isinstance(descriptor, Argument) and descriptor.is_spent:
                spent.append(node)
        results = _described_results(kernels, self._computed, self._graph.saved)
        graph.output(tuple(mapping[node] for node in results.nodes))
        reuse_spent_memory(graph, spent)
        return Program(
            name=name,
            module=graph_module(torch.nn.Module(), graph),
            inputs=tuple(inputs),
            outputs=tuple(results.outputs),
            aliases=tuple(results.aliases),
            statics=tuple(results.statics),
            in_tree=pytree.tree_structure((tuple([0] * len(args)), {})),
            out_tree=pytree.tree_structure([0] * len(self._computed)),
            stage="kernels",
            history=("inductor",),
            fallbacks=() if note is None else (note,),
        )

    def _input_descriptors(self, kernels: KernelGraph, args: Sequence[Any]) -> list[Input]:
        leaf = {index: position for position, index in enumerate(self.varying)}
        inputs: list[Input] = []
        every = self._all_inputs(args)
        shared = {index for group in overlap_groups(every) for index in group}
        spent = {index for index in self._graph.spent - shared if _can_hold_others(every[index])}
        for index, value in enumerate(every):
            if index in self._static:
                kind = "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
                inputs.append(Captured(kind, f"input {index}", value))
            elif isinstance(value, torch.Tensor):
                path, spec = f"args[{leaf[index]}]", TensorSpec.of(value)
                inputs.append(Argument(path, leaf[index], spec, is_spent=index in spent))
        inputs += [Captured("constant", f"constant {i}", value) for i, value in enumerate(kernels.constants)]
        return inputs


def _can_hold_others(tensor: torch.Tensor) -> bool:
    """Whether elements of any type can begin where a tensor begins in its storage."""
    return tensor.storage_offset() * tensor.element_size() % ALIGNED == 0


@dataclasses.dataclass(frozen=True)
class _Results:
    """The nodes that a Program returns, and the descriptors of all its results."""

    nodes: list[fx.Node] = dataclasses.field(default_factory=list[fx.Node])
    outputs: list[Output] = dataclasses.field(default_factory=list[Output])
    aliases: list[Alias] = dataclasses.field(default_factory=list[Alias])
    statics: list[Static] = dataclasses.field(default_factory=list[Static])


def _described_results(kernels: KernelGraph, positions: Sequence[int], saved: Container[int]) -> _Results:
    """Describe results of a graph of kernels: new tensors, views of inputs, second references, and constants.

    Args:
        kernels: The graph.
        positions: Positions of the results.
        saved: Positions of saved tensors.
    """
    number = {node: index for index, node in enumerate(kernels.module.graph.find_nodes(op="placeholder"))}
    values = output_values(kernels.module.graph)
    results = _Results()
    leaf_of: dict[fx.Node, int] = {}
    for leaf, index in enumerate(positions):
        value, path = values[index], f"result[{leaf}]"
        if not isinstance(value, fx.Node):
            results.statics.append(Static(path, leaf, value))
        elif root(value) in number:
            results.aliases.append(Alias(path, leaf, "input", number[root(value)], value.meta["spec"]))
        elif value in leaf_of:
            results.aliases.append(Alias(path, leaf, "result", leaf_of[value], None))
        else:
            leaf_of[value] = leaf
            results.nodes.append(value)
            results.outputs.append(Result(path, leaf, value.meta["spec"], is_saved=index in saved))
    return results
