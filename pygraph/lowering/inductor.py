"""Fused kernels: graphs compiled by Inductor, for ordinary launches and as nodes of a Program."""

# Inductor's entry points and what it returns are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingModuleSource=false
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pygraph.ir import ops
from pygraph.ir.descriptors import Fallback, TensorSpec
from pygraph.ir.dispatch_modes import no_dispatch_modes
from pygraph.ir.launches import Number
from pygraph.ir.program import graph_module
from pygraph.ir.scopes import Origin
from pygraph.ir.source_lines import line_in
from pygraph.lowering.kernel_configurations import other_configurations_tried
from pygraph.lowering.kernel_recorder import KernelGraph, UntraceableError
from pygraph.lowering.states import Crossing
from pygraph.lowering.wrapper import kernel_graph
from pygraph.process import progress

# Random numbers as in eager; one wrapper for the whole graph; and no graphs of Inductor's own.
SETTINGS: dict[str, Any] = {
    "fallback_random": True,
    "graph_partition": False,
    "triton.cudagraphs": False,
    "cpp_wrapper": False,
    "fx_wrapper": False,
}

ALIGNED = 16
"""Inductor's kernels read this many bytes at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class FusedGraph:
    """A graph compiled by Inductor.

    Attributes:
        code: Inductor's ``CompiledFxGraph``: takes a list of inputs, which it empties, and launches ordinarily.
        outputs: Its results as far as they are known: tensors by their specs, in the strides that Inductor chose.
        written: Positions of the inputs that it updates.
        aligned: Positions of the inputs that its kernels take to lie at multiples of 16 bytes; ordinary launches copy
            those that do not.
        crossing: The states of generators among its inputs and results, which are on the device.
        device: The device.
        name: Its name in reports.
        origins: The user's lines and scopes, by the names that the wrapper's comments have for what it computes.
        saved: Positions of the results that are saved tensors, which only a backward gets.
        spent: Positions of the inputs that nobody reads after a call: saved tensors that torch lets a backward reuse.
    """

    code: Callable[[list[Any]], Sequence[Any]]
    outputs: tuple[TensorSpec | None, ...]
    written: tuple[int, ...]
    aligned: frozenset[int]
    crossing: Crossing
    device: torch.device
    name: str
    origins: Mapping[str, Origin] = dataclasses.field(default_factory=dict[str, Origin])
    saved: frozenset[int] = frozenset()
    spent: frozenset[int] = frozenset()

    @property
    def key(self) -> str | None:
        """The key of its code in Inductor's cache; None if it is not there."""
        return getattr(self.code, "_fx_graph_cache_key", None)

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run on these inputs with ordinary launches."""
        return self.crossing.after(self.code(self.crossing.before(inputs)), self.device)

    def kernels(self, inputs: Sequence[TensorSpec | Number]) -> tuple[KernelGraph, Fallback | None]:
        """The kernels for inputs like these; or one node for all of them, and the reason."""
        try:
            return kernel_graph(wrapper_of(self.code), inputs, self.origins), None
        except UntraceableError as error:
            note = Fallback(f"the kernels of {self.name}", f"they are one node, whose parts are not seen: {error}")
            return self._as_one_node(inputs), note

    def _as_one_node(self, inputs: Sequence[TensorSpec | Number]) -> KernelGraph:
        graph = fx.Graph()
        numbers = {index: value for index, value in enumerate(inputs) if not isinstance(value, TensorSpec)}
        nodes: dict[int, fx.Node] = {}
        for index, spec in enumerate(inputs):
            if isinstance(spec, TensorSpec):
                nodes[index] = graph.placeholder(f"arg{index}")
                nodes[index].meta = {"spec": spec, "source": None}
        writes = self.spent.union(self.written)
        written = [index for index in nodes if index in writes]
        read = [index for index in nodes if index not in writes]
        name = _register(_Opaque(self, tuple(written), tuple(read), numbers))
        call = graph.call_function(
            torch.ops.pygraph.fused.default, (name, [nodes[i] for i in written], [nodes[i] for i in read])
        )
        call.meta = {"spec": self.outputs, "source": None}
        values: list[Any] = []
        for index, spec in enumerate(self.outputs):
            item = graph.call_function(operator.getitem, (call, index))
            item.meta = {"spec": spec, "source": None}
            values.append(item)
        graph.output(tuple(values))
        return KernelGraph(graph_module(torch.nn.Module(), graph), ())


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    name: str,
    origins: Mapping[str, Origin] | None = None,
    **options: Any,
) -> FusedGraph | None:
    """Compile a functional graph of decomposed ATen operations, which is used up; None if it computes nothing.

    Args:
        module: The graph, as AOTAutograd makes it: updates of inputs are ``copy_`` at its end.
        inputs: Fake tensors, and sizes.
        name: Its name in reports.
        origins: The user's lines and scopes, by the names of nodes in the graph that this one is made of; None for the
            lines of Dynamo.
        **options: As ``torch._inductor.compile_fx.compile_fx_inner`` takes them.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool, output_node

    values = list(output_node(module).args[0])  # pyright: ignore
    specs = [value.meta.get("val") if isinstance(value, fx.Node) else None for value in values]
    chosen: Any = {**options, "cudagraphs": BoxedBool(False)}
    crossing = Crossing.of(module.graph)
    origins = _lines(module.graph) if origins is None else origins
    progress.next_part()
    with no_dispatch_modes():  # as for torch.compile: constants that its cache has are no fake tensors
        code: Any = compile_fx_inner(module, inputs, **chosen)
    if not hasattr(code, "mutated_input_idxs"):
        return None
    strides = code.output_strides or [None] * len(specs)
    device = torch.device("cuda", next(iter(code.device_idxs), 0))
    outputs = [_spec(spec, stride) for spec, stride in zip(specs, strides, strict=True)]
    for index in crossing.results:
        found = outputs[index]
        outputs[index] = None if found is None else dataclasses.replace(found, device=device)
    written = tuple(sorted(code.mutated_input_idxs))
    return FusedGraph(code, tuple(outputs), written, frozenset(code.inputs_to_check), crossing, device, name, origins)


def _lines(graph: fx.Graph) -> dict[str, Origin]:
    """The user's lines, by the names that Inductor has for nodes: those of Dynamo's graph, from which they come."""
    found: dict[str, Origin] = {}
    for node in graph.nodes:
        line = line_in(node.meta.get("stack_trace"))
        if line is not None:
            origins = node.meta.get("from_node") or [node]
            found.setdefault(origins[0].name, {"source": line})
    return found


def _spec(value: Any, stride: Sequence[str] | None) -> TensorSpec | None:
    """The spec of an output with the strides that Inductor reports, as texts; None if a size is not known."""
    if not isinstance(value, torch.Tensor):
        return None
    layout: list[Any] = [*value.shape, *(value.stride() if stride is None else stride)]
    numbers = [int(n) for n in layout if isinstance(n, int) or (isinstance(n, str) and n.isdigit())]
    if len(numbers) < len(layout):
        return None
    rank = value.dim()
    return TensorSpec(tuple(numbers[:rank]), tuple(numbers[rank:]), value.dtype, value.device)


def wrapper_of(code: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """The Python function that Inductor has written, without the checks of addresses around it."""
    function: Any = code.current_callable
    while getattr(getattr(function, "__code__", None), "co_name", "call") != "call":
        names = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if "model" not in names:
            raise UntraceableError(f"its wrapper is not found in {function.__qualname__}")
        function = names["model"].cell_contents
    return function


def start_workers() -> None:
    """Start the processes in which Inductor compiles kernels, unless they are there, and do not wait for them.

    ``torch.compile`` starts them before it traces. Where the first kernel does, this process compiles kernel after
    kernel until they are ready, which takes seconds.
    """
    if torch.cuda.is_available():
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


@contextlib.contextmanager
def settings(**more: Any) -> Generator[None, None, None]:
    """A block with Inductor's settings as pygraph needs them."""
    from torch._inductor import config

    with config.patch({**SETTINGS, **more}), other_configurations_tried():
        yield


# ---- a graph as one node ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Opaque:
    """A compiled graph with the order of its inputs, and the numbers among them."""

    graph: FusedGraph
    written: tuple[int, ...]
    read: tuple[int, ...]
    numbers: dict[int, Number]

    def __call__(self, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given: dict[int, Any] = dict(self.numbers)
        given.update(zip(self.written, written, strict=True))
        given.update(zip(self.read, read, strict=True))
        return list(self.graph([given[index] for index in range(len(given))]))


_OPAQUE: dict[str, _Opaque] = {}
_COUNT = itertools.count()


def _register(opaque: _Opaque) -> str:
    name = f"{opaque.graph.name}#{next(_COUNT)}"
    _OPAQUE[name] = opaque
    return name


def _fused(name: str, written: list[torch.Tensor], read: list[torch.Tensor]) -> list[torch.Tensor]:
    return _OPAQUE[name](written, read)


def _fused_fake(name: str, written: list[torch.Tensor], read: list[torch.Tensor]) -> list[torch.Tensor]:
    return [spec.empty() for spec in _OPAQUE[name].graph.outputs if spec is not None]


ops.define("fused(str graph, Tensor(a!)[] written, Tensor[] read) -> Tensor[]", _fused, _fused_fake)
