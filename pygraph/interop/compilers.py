"""The compilers that AOTAutograd calls for the graphs of one compilation: each graph becomes a callable that replays.

AOTAutograd calls one compiler for a forward, a backward or an inference graph. Where Inductor makes the kernels, the
compiler takes the place of its inner compiler ``compile_fx_inner``; elsewhere it leaves ATen operations as they are.
"""

# AOTAutograd's and Inductor's entry points are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext, TracingContext

from pygraph.calls.options import Options
from pygraph.interop import live
from pygraph.interop.aten_graphs import AtenSource
from pygraph.interop.boxed import BoxedReplay
from pygraph.interop.graph_queries import aten_random_draws, copy_graph, device_of, needs_host, touches_cuda
from pygraph.interop.inductor_graphs import InductorSource, sizes_are_known
from pygraph.interop.specialized import GraphSource
from pygraph.ir.program import output_values
from pygraph.ir.random_draws import drop_links
from pygraph.ir.source_lines import line_in
from pygraph.lowering.draws import prepare_aot_draws
from pygraph.lowering.inductor import FusedGraph, compile_graph, settings
from pygraph.lowering.states import Crossing, settle
from pygraph.transforms.passes import PASSES, UNFUSED

_NUMBER = itertools.count()


@dataclasses.dataclass(frozen=True)
class Settings:
    """The ``mode`` and ``options`` of a ``torch.compile``.

    Attributes:
        options: Options of the replayed functions.
        fuse: Whether Inductor makes the kernels.
        replay: Whether graphs are replayed where nothing else is said of them.
        inductor: Inductor's configuration.
    """

    options: Options
    fuse: bool
    replay: bool
    inductor: Mapping[str, Any]


class Compilers:
    """The compilers of one compilation.

    Args:
        chosen: The settings of the ``torch.compile``.
        module: Dynamo's graph, of which the graphs to compile are made.

    Attributes:
        forward: What replays the forward of a training graph; None if nothing does.
    """

    def __init__(self, chosen: Settings, module: fx.GraphModule) -> None:
        self.chosen = chosen
        self.forward: BoxedReplay | None = None
        #: The annotation of ``torch._dynamo.override_cudagraphs`` (torch 2.13).
        self._override: Any = module.meta.get("cudagraph_annotation")
        compilation = CompileContext.current_compile_id()  # as in torch's logs
        lines = (line_in(node.meta.get("stack_trace")) for node in module.graph.nodes)
        line = next((line for line in lines if line is not None), None)
        self._origin = f"{next(_NUMBER) if compilation is None else compilation}" + (f" from {line}" if line else "")

    @contextlib.contextmanager
    def aot_cache(self, graph: fx.Graph) -> Generator[None, None, None]:
        """Let AOTAutograd load the graphs that it makes of Dynamo's graph from its cache on disk if they are there."""
        import torch._functorch.config as functorch_config
        from torch._inductor.compiler_bisector import CompilerBisector

        from pygraph.interop import aot_cache

        if bundles_code() or CompilerBisector.bisection_enabled:
            # A bundle would hold the code of graphs that are not Inductor's too; the bisector must count all graphs.
            with functorch_config.patch(enable_autograd_cache=False):
                yield
            return

        def replay(compiled: FusedGraph, static: Sequence[int] | None, kind: str) -> BoxedReplay:
            named = dataclasses.replace(compiled, name=self._name(kind))
            return self._replay(InductorSource(named), static, kind)

        kinds = [f"{kind} {self._replays(kind)}" for kind in ("inference", "forward", "backward")]
        lines = [f"{node.name} {line_in(node.meta.get('stack_trace'))}" for node in graph.nodes]
        with aot_cache.lookup(replay, *kinds, *lines):
            yield

    def inductor(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a graph to Inductor's kernels: takes the place of ``compile_fx_inner``."""
        from pygraph.interop import aot_cache

        with aot_cache.users_tag():
            return self._inductor(graph, inputs, options)

    def _inductor(self, graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        from pygraph.interop.aot_cache import ReplayedGraph

        kind = "backward" if options.get("is_backward") else "inference" if options.get("is_inference") else "forward"
        static = None if options.get("is_backward") else options.get("static_input_idxs", ())
        if not self._replays(kind) or not touches_cuda(graph) or _is_bisected_away():
            return _compile_fx_inner(graph, inputs, options)
        draws_as_eager = self.chosen.inductor.get("fallback_random", True)
        if draws_as_eager:
            prepare_aot_draws(graph.graph)
            graph.recompile()
        draws = aten_random_draws(graph.graph) if draws_as_eager else []
        # Inductor mutates the graph that it compiles, and orders draws by their data alone.
        original = copy_graph(graph) if len(draws) > 1 else graph
        if needs_host(graph.graph):
            return self._replay(self._source_with_host_work(original, inputs, options, kind), static, kind)
        if len(draws) > 1 and not sizes_are_known(inputs):
            _keep_strides_of_eager(graph)  # for other sizes than these, results may be those of `otherwise`
        with settings(**self.chosen.inductor):
            compiled = compile_graph(graph, inputs, self._name(kind), **options)
        if compiled is None:
            return _boxed(graph)
        if kind == "forward":
            compiled = dataclasses.replace(compiled, saved=_saved_results(len(compiled.outputs)))
        elif kind == "backward":
            compiled = dataclasses.replace(compiled, spent=_spent_inputs())
        source = InductorSource(compiled, draws)
        if len(draws) > 1 and not source.draws_in_order(inputs):
            if sizes_are_known(inputs):
                _forget_reported_strides()
                return self._replay(self._source_with_host_work(original, inputs, options, kind), static, kind)
            drop_links(original.graph)  # a Program's nodes run in its order, and AOTAutograd gets its runs again
            settle(original.graph, compiled.device)
            original.recompile()
            otherwise = AtenSource(original, PASSES, compiled, compiled.saved)
            return self._replay(InductorSource(compiled, draws, otherwise), static, kind)
        return ReplayedGraph.of(compiled, static, kind, self._replay(source, static, kind), inputs)

    def _source_with_host_work(
        self, graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any], kind: str
    ) -> GraphSource:
        """The source of a graph that no CUDA graph can hold as a whole; `devicify` and `fuse` see to its parts."""
        _keep_strides_of_eager(graph)
        ordinary = _LazilyCompiled(copy_graph(graph), inputs, options, self.chosen)
        drop_links(graph.graph)
        settle(graph.graph, device_of(graph))
        graph.recompile()
        saved = _saved_results(len(output_values(graph.graph))) if kind == "forward" else ()
        return AtenSource(graph, PASSES, ordinary, saved)

    def aten(self, kind: str) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
        """A compiler that leaves ATen operations as they are.

        Args:
            kind: ``inference``, ``forward`` or ``backward``.
        """

        def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            if not self._replays(kind) or _is_bisected_away():
                return _boxed(graph)
            static = None if kind == "backward" else _static_inputs()
            saved = _saved_results(len(output_values(graph.graph))) if kind == "forward" else ()
            return self._replay(AtenSource(graph, UNFUSED, lambda inputs: graph(*inputs), saved), static, kind)

        return compiler

    def _replays(self, kind: str) -> bool:
        forward = getattr(self._override, "fwd", None)
        backward = getattr(self._override, "bwd", None)
        replays = self.chosen.replay if forward is None else bool(forward)
        return replays and (kind != "backward" or backward is not False)

    def _name(self, kind: str) -> str:
        return f"{kind} {self._origin}"

    def _replay(self, source: GraphSource, static: Sequence[int] | None, kind: str) -> BoxedReplay:
        options = self.chosen.options
        if kind != "inference":  # tensors that a forward saves must last until its backward
            options = dataclasses.replace(options, reuse_outputs=False)
        made = BoxedReplay(source, static, options, live.pool_owner(), self._name(kind))
        live.CALLABLES.add(made)
        if kind == "forward":
            self.forward = made
        return made


def bundles_code() -> bool:
    """Whether torch keeps what a backend returns, with the code of its graphs."""
    import torch._functorch.config as functorch_config

    bundled: bool = functorch_config.bundled_autograd_cache or torch._dynamo.config.caching_precompile
    return bundled


def _is_bisected_away() -> bool:
    """Whether torch's bisector, which counts graphs, looks whether a failure goes away without this one."""
    from torch._inductor.compiler_bisector import CompilerBisector

    found: bool = CompilerBisector.disable_subsystem("inductor", "cudagraphs")
    return found


def _metadata() -> Any:
    """AOTAutograd's description of the graph that it compiles; None if there is none."""
    context: Any = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def _static_inputs() -> Sequence[int]:
    """Positions of parameters, buffers and tensors marked as static among the inputs of a forward."""
    metadata = _metadata()
    return () if metadata is None else metadata.static_input_indices or ()


def _saved_results(count: int) -> frozenset[int]:
    """Positions of saved tensors among so many results of a forward: they come last (checked with torch 2.11, 2.13)."""
    metadata = _metadata()
    return frozenset() if metadata is None else frozenset(range(metadata.num_forward, count))


def _spent_inputs() -> frozenset[int]:
    """Positions of saved tensors among the inputs of a backward whose memory it may reuse, as Inductor's code may.

    They are no part of arguments, results or gradients. A backward that may run again has none: where one has been
    compiled with some, AOTAutograd raises an error if the graph is to be kept.
    """
    metadata = _metadata()
    return frozenset() if metadata is None else frozenset(metadata.bw_donated_idxs or ())  # None if torch finds none


def _boxed(graph: fx.GraphModule) -> Any:
    from torch._functorch.aot_autograd import make_boxed_func  # pyright: ignore

    return make_boxed_func(graph.forward)


def _compile_fx_inner(graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(graph, inputs, **options)


class _LazilyCompiled:
    """A graph that Inductor compiles when it is first launched ordinarily."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any], chosen: Settings) -> None:
        self._compilation = (graph, inputs, options, chosen)
        self._crossing, self._device = Crossing.of(graph.graph), device_of(graph)
        self._compiled: Any = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if self._compiled is None:
            graph, examples, options, chosen = self._compilation
            with settings(**chosen.inductor):
                self._compiled = _compile_fx_inner(graph, examples, options)
        return self._crossing.after(self._compiled(self._crossing.before(inputs)), self._device)


def _forget_reported_strides() -> None:
    """Have AOTAutograd compile the backward for saved tensors as in eager, not as Inductor would have laid them out."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.clear()


def _keep_strides_of_eager(module: fx.GraphModule) -> None:
    """Have all results of a graph, also saved tensors, the strides that they have in eager, however it runs."""
    values = output_values(module.graph)
    visible = [index for index, value in enumerate(values) if isinstance(value, fx.Node)]
    module.graph.output_node().meta["user_visible_output_idxs"] = visible
