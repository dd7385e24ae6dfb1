"""A graph of ATen operations, specialised: traced again to a Program of ATen operations, as a function is.

A graph that Inductor does not compile as a whole takes this path: on a device that Inductor has no kernels for, with
work of the host in it, or with random draws that Inductor would reorder.
"""

# torch has no public name for operator overloads and higher-order operations. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import fx

from pygraph.guards.environment import Environment
from pygraph.interop.epilogue import SplitGraph, split_epilogue
from pygraph.interop.specialized import Boxed, SpecializedGraph
from pygraph.ir.descriptors import Output, Result
from pygraph.ir.effects import has_effect
from pygraph.ir.interpreter import Interpreter
from pygraph.ir.program import output_values
from pygraph.ir.source_lines import attributed_to, line_in
from pygraph.tracing.function_kinds import Traced
from pygraph.tracing.trace import trace_call
from pygraph.transforms.passes import Pass


class AtenSource:
    """A graph of ATen operations that can be specialised.

    Args:
        module: The graph.
        passes: The transforms that are applied to its Program.
        ordinary: Launches the graph ordinarily, given a list of all inputs.
        saved: Positions of the results that are saved tensors, which only a backward gets.
    """

    def __init__(
        self, module: fx.GraphModule, passes: tuple[Pass, ...], ordinary: Boxed, saved: Container[int] = ()
    ) -> None:
        self._module = module
        self._passes = passes
        self._ordinary = ordinary
        self._saved = saved

    def specialize(self, inputs: Sequence[Any], static: Sequence[int]) -> SpecializedGraph:
        """Bind the inputs at the positions ``static`` to the tensors that they are now."""
        split = split_epilogue(self._module, inputs)
        return _SpecializedAtenGraph(self._module, self._passes, self._ordinary, self._saved, inputs, static, split)


class _SpecializedAtenGraph(SpecializedGraph):
    def __init__(
        self,
        module: fx.GraphModule,
        passes: tuple[Pass, ...],
        ordinary: Boxed,
        saved: Container[int],
        inputs: Sequence[Any],
        static: Sequence[int],
        split: SplitGraph | None,
    ) -> None:
        unread = () if split is None else split.unread_inputs
        read = [None if index in unread else value for index, value in enumerate(inputs)]
        super().__init__(read, [*static, *unread])
        epilogue_results: Sequence[int] = ()
        if split is not None:
            self.epilogue, epilogue_results = split.epilogue, split.epilogue_results
            if split.module is not module:
                module = split.module
                ordinary = lambda inputs: module(*inputs)  # noqa: E731
        self._module = module
        self.passes = passes
        self._ordinary = ordinary
        self._saved = saved
        self._plan_results(module.graph, range(len(inputs)), epilogue_results)
        computed = [output_values(module.graph)[index] for index in self._computed]
        nodes = (node for node in module.graph.nodes if node.op not in ("placeholder", "output"))
        if not any(isinstance(value, fx.Node) for value in computed) and not any(map(_may_have_effects, nodes)):
            self.constant_results = tuple(computed)

    def __call__(self, *args: Any) -> Any:
        results = self._ordinary(self._all_inputs(args))
        return [results[index] for index in self._computed]

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        def graph(*varying: Any) -> list[Any]:
            results = _SourceLineInterpreter(self._module).run(*self._all_inputs(varying))
            return [results[index] for index in self._computed]

        traced = trace_call(graph, args, kwargs, static=static, name=name)
        program = traced.program.replace(outputs=tuple(map(self._described, traced.program.outputs)))
        return Traced(program, traced.static_leaves, Environment(None))

    def _described(self, output: Output) -> Output:
        if not isinstance(output, Result) or output.leaf < 0:
            return output
        return dataclasses.replace(output, is_saved=self._computed[output.leaf] in self._saved)


def _may_have_effects(node: fx.Node) -> bool:
    """Whether a node may do something besides computing its value."""
    return has_effect(node) or isinstance(node.target, torch._ops.HigherOrderOperator)


class _SourceLineInterpreter(Interpreter):
    """Runs a graph so that a trace of it attributes nodes to the user's lines that they come from."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        with attributed_to(line_in(n.meta.get("stack_trace"))):
            return super().run_node(n)
