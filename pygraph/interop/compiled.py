"""One graph of AOTAutograd's as a callable that replays: static inputs bound, results in the order that it expects.

AOTAutograd passes a list with everything: parameters, buffers, what its forward has saved, sizes, the caller's tensors.
Those that are the same tensors at every call become captured tensors of a Program, the sizes its constants, the rest
its arguments. Results that are inputs, or views of them, need no graph: they are put where they belong after the call.
"""

# AOTAutograd's conventions and torch's stack of modes are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import collections
import dataclasses
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from pygraph.calls.engine import Engine
from pygraph.calls.options import Options
from pygraph.errors import TraceError, describe
from pygraph.guards.environment import Environment
from pygraph.interop.beside import Parts, apart
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
    tensor_specs,
)
from pygraph.ir.effects import has_effect, is_random, root
from pygraph.ir.interpreter import Interpreter
from pygraph.ir.program import Program, graph_module, output_values
from pygraph.ir.source_lines import attributed_to, line_in
from pygraph.lowering.inductor import ALIGNED, FusedGraph
from pygraph.lowering.kernel_recorder import KernelGraph
from pygraph.tracing.function_kinds import SelfTracing, Traced
from pygraph.tracing.trace import trace_call
from pygraph.transforms.passes import GRAPHIFY, INDIRECT, SELECT, Pass

_MAX_BINDINGS = 8
"""So many sets of static inputs have graphs of their own; after that they are arguments like others."""


class Source(Protocol):
    """How a graph becomes a function of the inputs that change."""

    def bind(self, inputs: Sequence[Any], static: Sequence[int]) -> Bound:
        """The function, with the inputs at the positions ``static`` as they are now."""
        ...


class Bound(SelfTracing):
    """A graph as a function of the inputs that change.

    Args:
        inputs: All inputs of a call.
        static: Positions of those that stay as they are now.

    Attributes:
        passed: Positions of those inputs.
        passes: The transforms that are applied to its Program.
        returned: What the graph returns: a position among what this function returns, or what to do with all inputs.
        beside: What makes further results of all inputs; its results are counted from the end.
        constant: What this function returns, if that is known and nothing else is done.
    """

    passes: tuple[Pass, ...]
    beside: Callable[..., Sequence[Any]] | None = None
    constant: tuple[Any, ...] | None = None
    returned: tuple[int | Callable[[Sequence[Any]], Any], ...] | None = None

    def __init__(self, inputs: Sequence[Any], static: Sequence[int]) -> None:
        self._count = len(inputs)
        self._static = {index: inputs[index] for index in static}
        self.passed = tuple(index for index in range(len(inputs)) if index not in self._static)

    def _all(self, args: Sequence[Any]) -> list[Any]:
        """All inputs, given those that change."""
        given = iter(args)
        return [self._static[index] if index in self._static else next(given) for index in range(self._count)]

    def _plan_results(self, graph: fx.Graph, passed: Sequence[int], beside: Sequence[int] = ()) -> None:
        """Tell results that are inputs from those that depend on a call: new tensors, views of inputs, sizes.

        Args:
            graph: The graph.
            passed: Which of all inputs its first placeholders are.
            beside: Positions of the results that are made beside the graph.
        """
        position = dict(zip(graph.find_nodes(op="placeholder"), passed, strict=False))
        returned: list[int | Callable[[Sequence[Any]], Any]] = []
        self._own: list[int] = []
        for index, value in enumerate(output_values(graph)):
            if isinstance(value, fx.Node) and value in position:
                returned.append(operator.itemgetter(position[value]))
            elif index in beside:
                returned.append(beside.index(index) - len(beside))
            else:
                returned.append(len(self._own))
                self._own.append(index)
        if returned != list(range(len(self._own))) or self.beside is not None:
            self.returned = tuple(returned)

    def __call__(self, *args: Any) -> Any:
        """Run with ordinary launches."""
        raise NotImplementedError


class Replaying:
    """What AOTAutograd calls: takes a list of all inputs, empties it, and returns a list of results.

    Args:
        source: The graph.
        static: Positions of the inputs that are expected to be the same tensors at every call; None for those that are
            parameters.
        options: Options of the function; the numbers among the inputs are always static.
        root: The function whose memory all graphs share.
        name: What it is called in reports.
    """

    def __init__(self, source: Source, static: Sequence[int] | None, options: Options, root: Engine, name: str) -> None:
        self._boxed_call = True  # how torch knows that inputs come in a list; wrappers copy what an instance has
        self._source = source
        self._static = static
        self._options = options
        self._root = root
        self.__name__ = name
        self._engines: collections.OrderedDict[tuple[int, ...], _Engine] = collections.OrderedDict()
        self._last: _Engine | None = None
        self._bindings = 0
        self._lock = threading.Lock()

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run."""
        if torch._C._len_torch_dispatch_stack() and _is_unwatched():
            with _disable_current_modes():
                return self._run(inputs)
        return self._run(inputs)

    def _run(self, inputs: list[Any]) -> Sequence[Any]:
        engine = self._last
        if engine is None or not engine.fits(inputs):
            engine = self._engine(inputs)
        return engine(inputs)

    def _engine(self, inputs: Sequence[Any]) -> _Engine:
        with self._lock:
            if self._static is None:
                self._static = [i for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)]
            static = self._static if self._bindings <= _MAX_BINDINGS else ()
            key = tuple(id(inputs[index]) for index in static)
            engine = self._engines.get(key)
            if engine is None or not engine.fits(inputs):
                self._bindings += 1
                if self._bindings > _MAX_BINDINGS:
                    self._forget()
                    static, key = (), ()
                bound = self._source.bind(inputs, static)
                engine = self._engines[key] = _Engine(bound, inputs, static, self._options, self._root, self.__name__)
            self._last = engine
            return engine

    def _forget(self) -> None:
        for engine in self._engines.values():
            engine.function.release()
        self._engines.clear()

    def reset(self) -> None:
        """Give back all graphs and let go of the static inputs, without waiting for a call that may be going on.

        What is called again, as the backward of an earlier forward, is compiled again.
        """
        engines = list(self._engines.values())
        self._engines.clear()  # in place: AOTAutograd's wrappers have copies of what an instance has
        self._last, self._bindings = None, 0
        for engine in engines:
            engine.function.release_soon()

    def functions(self) -> list[Engine]:
        """The transformed functions behind it, one for each set of static inputs."""
        return [engine.function for engine in list(self._engines.values())]

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # bound above, as at the end of a process a module's names are gone
            return
        for engine in self.__dict__.get("_engines", {}).values():
            engine.function.release(wait=False)


class _Engine:
    """A graph with its static inputs bound."""

    def __init__(
        self,
        bound: Bound,
        inputs: Sequence[Any],
        static: Sequence[int],
        options: Options,
        root: Engine,
        name: str,
    ) -> None:
        self._static = [inputs[index] for index in static]
        self._pick_static = _picker(static)
        self._pick_passed = _picker(bound.passed)
        numbers = tuple(
            place for place, index in enumerate(bound.passed) if not isinstance(inputs[index], torch.Tensor)
        )
        bound.__name__ = name  # pyright: ignore[reportAttributeAccessIssue]
        own = Options(
            numbers, (), options.max_graphs, options.strict, options.timer, options.mechanism, options.reuse_outputs
        )
        self.function: Engine = Engine(bound, bound.passes, own, root)
        self._bound, self._constant = bound, bound.constant

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether its static inputs are these."""
        return all(map(operator.is_, self._pick_static(inputs), self._static))

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        constant = self._constant
        results = self.function(*self._pick_passed(inputs)) if constant is None else list(constant)
        returned = self._bound.returned
        if returned is None:
            inputs.clear()
            return results
        if self._bound.beside is not None:
            results = [*results, *self._bound.beside(*inputs)]
        found = [results[entry] if isinstance(entry, int) else entry(inputs) for entry in returned]
        inputs.clear()
        return found


def _is_unwatched() -> bool:
    """Whether the modes that see operations are AOTAutograd's alone: it looks at custom operations in a first call."""
    return all(type(mode).__name__ in _BLIND for mode in _get_current_dispatch_mode_stack())


_BLIND = frozenset({"_AnalyzeCustomOpInputOutputMode"})


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(positions) < 2:
        return lambda values: tuple(values[index] for index in positions)
    return operator.itemgetter(*positions)  # pyright: ignore[reportReturnType]


# ---- a graph that Inductor has compiled ------------------------------------------------------------------------


class FusedSource:
    """A graph whose kernels are Inductor's.

    Args:
        graph: The compiled graph.
        draws: The random draws in the order in which eager makes them.
        otherwise: How the graph runs if Inductor has put them in another order.
    """

    def __init__(self, graph: FusedGraph, draws: Sequence[Any] = (), otherwise: Source | None = None) -> None:
        self._graph = graph
        self._draws = list(draws)
        self._otherwise = otherwise
        self._known: _Known | None = None

    def keeps_order(self, inputs: Sequence[Any]) -> bool:
        """Whether it is known already, from inputs without symbolic sizes, that draws are made as in eager.

        What it finds of its kernels on the way is for the first call with such inputs.
        """
        sizes = (size for value in inputs for size in (value.shape if isinstance(value, torch.Tensor) else (value,)))
        if not all(isinstance(size, int) for size in sizes):
            return False
        with _disable_current_modes():
            self._known = _known(self._graph, inputs)
        return draws_of(self._known.kernels.module.graph) == self._draws

    def bind(self, inputs: Sequence[Any], static: Sequence[int]) -> Bound:
        """The function, with the inputs at the positions ``static`` as they are now."""
        known, self._known = self._known, None
        bound = _FusedBound(self._graph, inputs, static, known)
        if self._otherwise is not None and bound.draws != self._draws:
            return self._otherwise.bind(inputs, static)
        return bound


@dataclasses.dataclass(frozen=True)
class _Known:
    """The kernels of a graph for inputs like some, and what is told of them."""

    specs: list[Any]
    kernels: KernelGraph
    note: Fallback | None


def _known(graph: FusedGraph, inputs: Sequence[Any]) -> _Known:
    specs = _specs(inputs)
    return _Known(specs, *graph.kernels(specs))


def _specs(inputs: Sequence[Any]) -> list[Any]:
    return [TensorSpec.of(value) if isinstance(value, torch.Tensor) else value for value in inputs]


def draws_of(graph: fx.Graph) -> list[tuple[str, tuple[int, ...]]]:
    """The random draws of a graph whose nodes have specs: the operation, and the shape of what is drawn."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for node in graph.nodes:
        if is_random(node):
            spec = next(iter(tensor_specs(node.meta["spec"])), None)
            shape = () if spec is None else spec.shape
            found.append((str(node.target), () if -1 in shape else shape))
    return found


class _FusedBound(Bound):
    passes = (INDIRECT, GRAPHIFY, SELECT)

    def __init__(
        self, graph: FusedGraph, inputs: Sequence[Any], static: Sequence[int], known: _Known | None = None
    ) -> None:
        super().__init__(inputs, static)
        self._graph = graph
        #: The kernels for inputs of the last sizes.
        self._known = known
        kernels = self._kernels([inputs[index] for index in self.passed]).kernels
        self.draws = draws_of(kernels.module.graph)
        tensors = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        self._plan_results(kernels.module.graph, tensors)

    def __call__(self, *args: Any) -> Any:
        results = self._graph(self._all(args))
        return [results[index] for index in self._own]

    def _kernels(self, args: Sequence[Any]) -> _Known:
        inputs = self._all(args)
        if self._known is None or self._known.specs != _specs(inputs):
            self._known = _known(self._graph, inputs)
        return self._known

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        for index, value in enumerate(self._all(args)):
            if index in self._graph.aligned and value.data_ptr() % ALIGNED:
                raise TraceError(describe(name, f"input {index} does not lie at a multiple of {ALIGNED} bytes"))
        known = self._kernels(args)
        self._known = None
        return Traced(self._program(known.kernels, known.note, args, name), static, Environment(None))

    def _program(self, kernels: KernelGraph, note: Fallback | None, args: Sequence[Any], name: str) -> Program:
        leaf = {index: place for place, index in enumerate(self.passed)}
        inputs: list[Input] = []
        for index, value in enumerate(self._all(args)):
            if index in self._static:
                kind = "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
                inputs.append(Captured(kind, f"input {index}", value))
            elif isinstance(value, torch.Tensor):
                inputs.append(Argument(f"args[{leaf[index]}]", leaf[index], TensorSpec.of(value)))
        inputs += [Captured("constant", f"constant {i}", value) for i, value in enumerate(kernels.constants)]
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(kernels.module.graph, mapping)
        for old, new in mapping.items():
            new.meta = dict(old.meta)
        for node, descriptor in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta = {"spec": descriptor.spec, "source": None}  # pyright: ignore
        results, outputs, aliases, statics = self._described(kernels, mapping)
        graph.output(tuple(results))
        return Program(
            name=name,
            module=graph_module(torch.nn.Module(), graph),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            aliases=tuple(aliases),
            statics=tuple(statics),
            in_tree=pytree.tree_structure((tuple([0] * len(args)), {})),
            out_tree=pytree.tree_structure([0] * len(self._own)),
            stage="kernels",
            history=("inductor",),
            fallbacks=() if note is None else (note,),
        )

    def _described(
        self, kernels: KernelGraph, mapping: dict[fx.Node, fx.Node]
    ) -> tuple[list[fx.Node], list[Output], list[Alias], list[Static]]:
        """The nodes that a Program returns, and what all its results are."""
        number = {node: index for index, node in enumerate(kernels.module.graph.find_nodes(op="placeholder"))}
        values = output_values(kernels.module.graph)
        results: list[fx.Node] = []
        outputs: list[Output] = []
        aliases: list[Alias] = []
        statics: list[Static] = []
        leaf_of: dict[fx.Node, int] = {}
        for leaf, index in enumerate(self._own):
            value, path = values[index], f"result[{leaf}]"
            if not isinstance(value, fx.Node):
                statics.append(Static(path, leaf, value))
            elif root(value) in number:
                aliases.append(Alias(path, leaf, "input", number[root(value)], value.meta["spec"]))
            elif value in leaf_of:
                aliases.append(Alias(path, leaf, "result", leaf_of[value], None))
            else:
                leaf_of[value] = leaf
                results.append(mapping[value])
                outputs.append(Result(path, leaf, value.meta["spec"]))
        return results, outputs, aliases, statics


# ---- a graph of ATen operations --------------------------------------------------------------------------------


class TracedSource:
    """A graph that takes the way of ordinary functions: through a Program of ATen operations.

    Args:
        module: The graph.
        passes: The transforms.
        ordinary: What launches it ordinarily, given a list of all inputs.
    """

    def __init__(
        self, module: fx.GraphModule, passes: tuple[Pass, ...], ordinary: Callable[[list[Any]], Sequence[Any]]
    ) -> None:
        self._module = module
        self._passes = passes
        self._ordinary = ordinary

    def bind(self, inputs: Sequence[Any], static: Sequence[int]) -> Bound:
        """The function, with the inputs at the positions ``static`` as they are now."""
        parts = apart(self._module, inputs)
        return _TracedBound(self._module, self._passes, self._ordinary, inputs, static, parts)


class _TracedBound(Bound):
    def __init__(
        self,
        module: fx.GraphModule,
        passes: tuple[Pass, ...],
        ordinary: Callable[[list[Any]], Sequence[Any]],
        inputs: Sequence[Any],
        static: Sequence[int],
        parts: Parts | None,
    ) -> None:
        unused = () if parts is None else parts.unused
        read = [None if index in unused else value for index, value in enumerate(inputs)]
        super().__init__(read, [*static, *unused])
        results: Sequence[int] = ()
        if parts is not None:
            self.beside, results = parts.made, parts.results
            if parts.module is not module:
                module = parts.module
                ordinary = lambda all: module(*all)  # noqa: E731
        self._module = module
        self.passes = passes
        self._ordinary = ordinary
        self._plan_results(module.graph, range(len(inputs)), results)
        own = [output_values(module.graph)[index] for index in self._own]
        nodes = (node for node in module.graph.nodes if node.op not in ("placeholder", "output"))
        if not any(isinstance(value, fx.Node) for value in own) and not any(map(_may_act, nodes)):
            self.constant = tuple(own)

    def __call__(self, *args: Any) -> Any:
        results = self._ordinary(self._all(args))
        return [results[index] for index in self._own]

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        def graph(*passed: Any) -> list[Any]:
            results = _WithSources(self._module).run(*self._all(passed))
            return [results[index] for index in self._own]

        traced = trace_call(graph, args, kwargs, static=static, name=name)
        return Traced(traced.program, traced.static_leaves, Environment(None))


def _may_act(node: fx.Node) -> bool:
    """Whether a node may do something besides computing its value."""
    return has_effect(node) or isinstance(node.target, torch._ops.HigherOrderOperator)


class _WithSources(Interpreter):
    """Runs a graph so that a trace of it has the lines that its nodes come from."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # which changes the messages of errors

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        with attributed_to(line_in(n.meta.get("stack_trace"))):
            return super().run_node(n)
