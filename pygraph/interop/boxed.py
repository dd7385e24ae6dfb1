"""A graph of AOTAutograd's as a boxed callable that replays: one CUDA-graph function per set of static inputs."""

# torch's stack of dispatch modes is private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import collections
import dataclasses
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph.calls.engine import Engine
from pygraph.calls.options import Options
from pygraph.interop.specialized import GraphSource, SpecializedGraph
from pygraph.ir.dispatch_modes import no_dispatch_modes

_MAX_SPECIALIZATIONS = 8
"""So many sets of static inputs have graphs of their own; after that static inputs are arguments like others."""


class BoxedReplay:
    """A callable in AOTAutograd's boxed convention: takes a list of all inputs, empties it, and returns all results.

    Args:
        source: The graph.
        static: Positions of the inputs that are expected to be the same tensors at every call; None for those that are
            parameters.
        options: Options of the function; the numbers among the inputs are always static.
        pool_owner: The function whose memory pools all graphs share.
        name: The name in reports.
    """

    def __init__(
        self,
        source: GraphSource,
        static: Sequence[int] | None,
        options: Options,
        pool_owner: Engine,
        name: str,
    ) -> None:
        self._boxed_call = True  # torch looks for this attribute; its wrappers copy what an instance has
        self._source = source
        self._static = static
        self._options = options
        self._pool_owner = pool_owner
        self.__name__ = name
        self._specializations: collections.OrderedDict[tuple[int, ...], _Specialization] = collections.OrderedDict()
        self._last: _Specialization | None = None
        self._count = 0
        self._lock = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run."""
        if torch._C._len_torch_dispatch_stack() and _modes_see_no_operations():
            with no_dispatch_modes():
                return self._run(inputs)
        return self._run(inputs)

    def _run(self, inputs: list[Any]) -> Sequence[Any]:
        specialization = self._last
        if specialization is None or not specialization.matches(inputs):
            specialization = self._specialize(inputs)
        return specialization(inputs)

    def _specialize(self, inputs: Sequence[Any]) -> _Specialization:
        with self._lock:
            if self._static is None:
                self._static = [i for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)]
            static = self._static if self._count <= _MAX_SPECIALIZATIONS else ()
            key = tuple(id(inputs[index]) for index in static)
            found = self._specializations.get(key)
            if found is None or not found.matches(inputs):
                self._count += 1
                if self._count > _MAX_SPECIALIZATIONS:
                    self._release()
                    static, key = (), ()
                graph = self._source.specialize(inputs, static)
                found = _Specialization(graph, inputs, static, self._options, self._pool_owner, self.__name__)
                self._specializations[key] = found
            self._last = found
            return found

    def _release(self) -> None:
        for specialization in self._specializations.values():
            specialization.function.release()
        self._specializations.clear()

    def reset(self) -> None:
        """Free all graphs and references to static inputs, without waiting for a call that may be running.

        A callable that is called again, as the backward of an earlier forward, is compiled again.
        """
        specializations = list(self._specializations.values())
        self._specializations.clear()  # in place: AOTAutograd's wrappers have copies of what an instance has
        self._last, self._count = None, 0
        for specialization in specializations:
            specialization.function.release_soon()

    def functions(self) -> list[Engine]:
        """The transformed functions that serve the calls, one for each set of static inputs."""
        return [specialization.function for specialization in list(self._specializations.values())]

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # bound above, as at the end of a process a module's names are gone
            return
        for specialization in self.__dict__.get("_specializations", {}).values():
            specialization.function.release(wait=False)


class _Specialization:
    """A graph with its static inputs bound, and the assembly of its results."""

    def __init__(
        self,
        graph: SpecializedGraph,
        inputs: Sequence[Any],
        static: Sequence[int],
        options: Options,
        pool_owner: Engine,
        name: str,
    ) -> None:
        self._static = [inputs[index] for index in static]
        self._pick_static = _picker(static)
        self._pick_varying = _picker(graph.varying)
        numbers = tuple(leaf for leaf, index in enumerate(graph.varying) if not isinstance(inputs[index], torch.Tensor))
        graph.__name__ = name  # pyright: ignore[reportAttributeAccessIssue]
        own = dataclasses.replace(options.of_derived(), static_argnums=numbers, reuse_outputs=options.reuse_outputs)
        self.function = Engine(graph, graph.passes, own, pool_owner)
        self._constant_results, self._epilogue = graph.constant_results, graph.epilogue
        self._assemble = None if graph.assembly is None else _picker(graph.assembly)

    def matches(self, inputs: Sequence[Any]) -> bool:
        """Whether the static inputs of a call are those that are bound."""
        return not self._static or all(map(operator.is_, self._pick_static(inputs), self._static))

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        constant = self._constant_results
        results = self.function(*self._pick_varying(inputs)) if constant is None else list(constant)
        if self._assemble is not None:
            epilogue = () if self._epilogue is None else self._epilogue(*inputs)
            results = self._assemble([*inputs, *results, *epilogue])
        inputs.clear()
        return results


def _modes_see_no_operations() -> bool:
    """Whether all active dispatch modes are AOTAutograd's own, which look at custom operations in first calls only."""
    return all(type(mode).__name__ in _IGNORED_MODES for mode in _get_current_dispatch_mode_stack())


_IGNORED_MODES = frozenset({"_AnalyzeCustomOpInputOutputMode"})


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function from a sequence to the tuple of its items at these positions."""
    if not positions:
        return lambda values: ()
    if len(positions) == 1:
        position = positions[0]
        return lambda values: (values[position],)
    return operator.itemgetter(*positions)  # pyright: ignore[reportReturnType]
