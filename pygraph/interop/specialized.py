"""A graph of AOTAutograd's, specialised to its static inputs: a function of the inputs that vary between calls.

AOTAutograd passes parameters, buffers, saved tensors, sizes and the caller's tensors in one list. Specialising binds
those that are the same tensors at every call; what remains is traced and replayed like a function of its own. A result
that is an input, or a view of one, needs no graph: it is made of the inputs of the call after the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx

from pygraph.ir.program import output_values
from pygraph.tracing.function_kinds import SelfTracing
from pygraph.transforms.passes import Pass

Boxed = Callable[[list[Any]], Sequence[Any]]
"""AOTAutograd's calling convention: takes a list of all inputs, may empty it, and returns all results."""


class GraphSource(Protocol):
    """A graph that can be specialised."""

    def specialize(self, inputs: Sequence[Any], static: Sequence[int]) -> SpecializedGraph:
        """Bind the inputs at the positions ``static`` to the tensors that they are now."""
        ...


class SpecializedGraph(SelfTracing):
    """A function of the varying inputs of a graph.

    Args:
        inputs: All inputs of a call.
        static: Positions of the inputs that are bound to what they are in this call.

    Attributes:
        varying: Positions of the other inputs, which are the arguments of this function.
        passes: The transforms that are applied to its Program.
        assembly: For each result of the graph, its position among all inputs, the results of this function and those of
            ``epilogue``, one after the other. None if this function's results are the graph's.
        epilogue: A function of all inputs that computes results for which no graph is replayed.
        constant_results: The results of this function if they are known and it does nothing else.
    """

    passes: tuple[Pass, ...]
    epilogue: Callable[..., Sequence[Any]] | None = None
    constant_results: tuple[Any, ...] | None = None
    assembly: tuple[int, ...] | None = None

    def __init__(self, inputs: Sequence[Any], static: Sequence[int]) -> None:
        self._count = len(inputs)
        self._static = {index: inputs[index] for index in static}
        self.varying = tuple(index for index in range(len(inputs)) if index not in self._static)

    def _all_inputs(self, args: Sequence[Any]) -> list[Any]:
        """The inputs of the graph, given those that vary."""
        if not self._static:
            return list(args)
        given = iter(args)
        return [self._static[index] if index in self._static else next(given) for index in range(self._count)]

    def _plan_results(self, graph: fx.Graph, inputs: Sequence[int], epilogue_results: Sequence[int] = ()) -> None:
        """Tell results that are inputs, or of the epilogue, from those that the graph computes.

        Args:
            graph: The graph.
            inputs: Positions among all inputs of its first placeholders.
            epilogue_results: Positions of the results that the epilogue computes.
        """
        position = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=False))
        values = output_values(graph)
        inputs_of = {i: position[v] for i, v in enumerate(values) if isinstance(v, fx.Node) and v in position}
        #: Positions of the results that the graph computes.
        self._computed = [i for i in range(len(values)) if i not in inputs_of and i not in epilogue_results]
        if len(self._computed) == len(values) and self.epilogue is None:
            return
        made = {result: self._count + i for i, result in enumerate([*self._computed, *epilogue_results])}
        self.assembly = tuple({**made, **inputs_of}[i] for i in range(len(values)))

    def __call__(self, *args: Any) -> Any:
        """Run with ordinary launches."""
        raise NotImplementedError
