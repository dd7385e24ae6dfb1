"""``torch.compile(backend="pygraph")``.

Dynamo, AOTAutograd and Inductor do what they do for ``torch.compile`` itself; what Inductor would hand back as a
callable that launches its kernels one by one is replayed as CUDA graphs instead. A graph with host values, or with work
that no CUDA graph can hold, goes through `devicify` and `fuse` first, so that only that work runs between graphs.
"""

# Dynamo's and Inductor's entry points for backends are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext, TracingContext
from torch._inductor.compiler_bisector import CompilerBisector
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from pygraph.api.jit import make_options
from pygraph.calls.engine import Engine
from pygraph.calls.options import Options
from pygraph.errors import ArgumentError, describe
from pygraph.interop.compiled import FusedSource, Replaying, TracedSource, draws_of
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import host_reason, is_work
from pygraph.ir.program import output_values
from pygraph.ir.source_lines import line_in
from pygraph.lowering.inductor import SETTINGS, FusedGraph, compile_graph, settings
from pygraph.lowering.states import Crossing, settle
from pygraph.process.turns import members
from pygraph.report.explain import Explanation
from pygraph.transforms.passes import PASSES, UNFUSED

_OWN = ("max_graphs", "strict", "reuse_outputs", "mechanism", "fuse")


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What ``mode`` and ``options`` of ``torch.compile`` say."""

    options: Options
    fuse: bool
    replay: bool
    inductor: Mapping[str, Any]


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's: ``torch.compile(model, backend="pygraph")``.

    Inference, and forward and backward of training, become CUDA graphs of Inductor's kernels that read their inputs
    where they are and return fresh results. Random numbers are those of eager.

    Args:
        module: The graph.
        inputs: Its example inputs.
        mode: As for ``torch.compile``; those with ``no-cudagraphs`` in their name replay nothing.
        options: ``max_graphs``, ``strict``, ``reuse_outputs`` and ``mechanism`` as in `pygraph.jit`; ``fuse`` (default
            True) as there; all others are Inductor's.

    Returns:
        A function of the inputs.

    Raises:
        ArgumentError: There is no such mode or option.
        FallbackError: With ``strict``, when called.

    Example:
        >>> import torch, pygraph
        >>> @torch.compile(backend=pygraph.backend)
        ... def f(x):
        ...     return torch.relu(x) + 1
        >>> f(torch.tensor([-1.0, 2.0], device=pygraph.default_device())).tolist()
        [1.0, 3.0]

    Source: PyGraph is "built atop PyTorch2's compilation framework", arXiv 2503.19779.
    """
    chosen = _settings(mode, options or {})
    _be_reset()
    compiler = _Compiler(chosen, module)
    if not chosen.fuse or not _on_cuda(module, inputs):
        return _without_inductor(compiler, module, inputs)
    from torch._inductor.compile_fx import compile_fx

    patches = {**SETTINGS, **chosen.inductor}
    with settings(**chosen.inductor), compiler.kept(module.graph):
        made: Any = compile_fx(module, inputs, inner_compile=compiler.fused, config_patches=patches)
        return made


def _settings(mode: str | None, options: Mapping[str, Any]) -> _Settings:
    from torch._inductor import config, list_mode_options

    own = {key: options[key] for key in _OWN if key in options}
    inductor = {key.replace("-", "_"): value for key, value in options.items() if key not in _OWN}
    modes: Mapping[str, Any] = list_mode_options()
    if mode is not None and mode not in modes:
        raise ArgumentError(describe("torch.compile(backend='pygraph')", f"mode={mode!r}", expected=", ".join(modes)))
    known = config.get_config_copy()
    for key in inductor:
        if key not in known:
            raise ArgumentError(
                describe(
                    "torch.compile(backend='pygraph')", f"there is no option {key!r}",
                    expected=f"{', '.join(_OWN)}, or one of torch._inductor.list_options()",
                )
            )  # fmt: skip
    of_mode = {key: value for key, value in (modes[mode] if mode else {}).items() if key != "triton.cudagraphs"}
    fuse = bool(own.pop("fuse", True))
    replay = mode is None or "no-cudagraphs" not in mode
    return _Settings(make_options(**own), fuse, replay, {**of_mode, **inductor})


def _on_cuda(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether Inductor makes the kernels: for CUDA devices, and for graphs on the host alone."""
    types = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
    types |= {device.type for node in module.graph.nodes for device in _devices(node.meta.get("example_value"))}
    return types <= {"cuda", "cpu"}


def _devices(value: Any) -> list[torch.device]:
    """Devices of the tensors in a node's example value."""
    items = value if isinstance(value, (list, tuple)) else (value,)
    return [item.device for item in items if isinstance(item, torch.Tensor)]


_LIVE: weakref.WeakSet[Replaying] = weakref.WeakSet()
_NUMBER = itertools.count()


@functools.cache
def _root() -> Engine:
    """Whose memory all graphs share: they are replayed in turn, and what they return is not in it."""
    return Engine(_nothing, UNFUSED, Options())


def _nothing() -> None:
    return None


def reset() -> None:
    """Give back what was compiled: ``torch._dynamo.reset()`` calls this of every backend that it knows.

    It drops its own caches, but keeps code that was compiled before a graph break (seen with torch 2.13).
    """
    for made in members(_LIVE):
        made.reset()
    _root().release_soon()


backend.reset = reset  # pyright: ignore[reportFunctionMemberAccess]


def _be_reset() -> None:
    """Have Dynamo know this backend, which it forgets when it is reset. Private; checked with torch 2.13."""
    known: dict[int, Any] | None = getattr(torch._dynamo.eval_frame, "cached_backends", None)
    if known is not None:
        known.setdefault(id(backend), backend)


def explain() -> Explanation:
    """What runs how in everything that ``torch.compile(backend="pygraph")`` has compiled and that is still alive.

    Returns:
        A report like that of a jitted function, with one entry per graph and kind of call.

    Example:
        >>> import pygraph
        >>> isinstance(str(pygraph.explain()), str)
        True
    """
    reports = [function.explain() for one in members(_LIVE) for function in one.functions()]
    return Explanation("torch.compile", (), {}).with_derived(sorted(reports, key=lambda report: report.name))


class _Compiler:
    """Makes callables of the graphs of one compilation."""

    def __init__(self, chosen: _Settings, module: fx.GraphModule) -> None:
        self._chosen = chosen
        #: What ``torch._dynamo.override_cudagraphs`` says of this graph (torch 2.13).
        self._override: Any = module.meta.get("cudagraph_annotation")
        compilation = CompileContext.current_compile_id()  # as in torch's logs
        lines = (line_in(node.meta.get("stack_trace")) for node in module.graph.nodes)
        line = next((line for line in lines if line is not None), None)
        self._where = f"{next(_NUMBER) if compilation is None else compilation}" + (f" from {line}" if line else "")

    @contextlib.contextmanager
    def kept(self, graph: fx.Graph) -> Generator[None, None, None]:
        """Have AOTAutograd take what it makes of Dynamo's graph from disk if it can."""
        import torch._functorch.config as functorch_config

        from pygraph.interop import aot_cache

        bundled = functorch_config.bundled_autograd_cache or torch._dynamo.config.caching_precompile
        if bundled or CompilerBisector.bisection_enabled:
            # It would keep all graphs with their code, those that are not Inductor's too, or graphs that it must count.
            with functorch_config.patch(enable_autograd_cache=False):
                yield
            return

        def replay(compiled: FusedGraph, static: Sequence[int] | None, kind: str) -> Replaying:
            named = dataclasses.replace(compiled, name=self._name(kind))
            return self._replaying(FusedSource(named), static, kind)

        kinds = [f"{kind} {self._replays(kind)}" for kind in ("inference", "forward", "backward")]
        lines = [f"{node.name} {line_in(node.meta.get('stack_trace'))}" for node in graph.nodes]
        with aot_cache.looked_up(replay, *kinds, *lines):
            yield

    def fused(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """In the place of Inductor's own inner compiler."""
        from pygraph.interop import aot_cache

        with aot_cache.inside():
            return self._fused(graph, inputs, options)

    def _fused(self, graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        from pygraph.interop.aot_cache import ReplayedGraph

        kind = "backward" if options.get("is_backward") else "inference" if options.get("is_inference") else "forward"
        static = None if options.get("is_backward") else options.get("static_input_idxs", ())
        if not self._replays(kind) or not _touches_cuda(graph) or _is_bisected_away():
            return _ordinary(graph, inputs, options)
        draws = _draws(graph.graph) if self._chosen.inductor.get("fallback_random", True) else []
        # Inductor uses up what it is given, and orders draws by their data alone.
        original = _copy(graph) if len(draws) > 1 else graph
        if _needs_host(graph.graph):
            # Its results keep the strides that they have in eager, however it runs.
            output, values = original.graph.output_node(), output_values(original.graph)
            output.meta["user_visible_output_idxs"] = [i for i, v in enumerate(values) if isinstance(v, fx.Node)]
            ordinary = _Lazily(_copy(original), inputs, options, self._chosen)
            settle(original.graph, _device(original))
            original.recompile()
            return self._replaying(TracedSource(original, PASSES, ordinary), static, kind)
        with settings(**self._chosen.inductor):
            compiled = compile_graph(graph, inputs, self._name(kind), **options)
        if compiled is None:
            return _boxed(graph)
        source = FusedSource(compiled, draws)
        if len(draws) > 1 and not source.keeps_order(inputs):
            settle(original.graph, compiled.device)
            original.recompile()
            otherwise = TracedSource(original, PASSES, compiled)
            return self._replaying(FusedSource(compiled, draws, otherwise), static, kind)
        return ReplayedGraph.of(compiled, static, kind, self._replaying(source, static, kind), inputs)

    def aten(self, kind: str) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
        """A compiler for AOTAutograd that leaves operations as they are."""

        def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            if not self._replays(kind) or _is_bisected_away():
                return _boxed(graph)
            static = None if kind == "backward" else _static_inputs()
            return self._replaying(TracedSource(graph, UNFUSED, lambda all: graph(*all)), static, kind)

        return compiler

    def _replays(self, kind: str) -> bool:
        forward = getattr(self._override, "fwd", None)
        backward = getattr(self._override, "bwd", None)
        replays = self._chosen.replay if forward is None else bool(forward)
        return replays and (kind != "backward" or backward is not False)

    def _name(self, kind: str) -> str:
        return f"{kind} {self._where}"

    def _replaying(self, source: Any, static: Sequence[int] | None, kind: str) -> Replaying:
        options = self._chosen.options
        if kind != "inference":  # what a forward saves must last until its backward
            options = dataclasses.replace(options, reuse_outputs=False)
        made = Replaying(source, static, options, _root(), self._name(kind))
        _LIVE.add(made)
        return made


def _is_bisected_away() -> bool:
    """Whether torch's bisector, which counts graphs, looks whether a failure goes away without this one."""
    found: bool = CompilerBisector.disable_subsystem("inductor", "cudagraphs")
    return found


def _static_inputs() -> Sequence[int]:
    """Positions of parameters, buffers and what is marked as static among the inputs of a forward."""
    context: Any = TracingContext.try_get()
    return () if context is None or context.fw_metadata is None else context.fw_metadata.static_input_indices or ()


def _without_inductor(compiler: _Compiler, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    made: Any = aot_autograd(
        fw_compiler=compiler.aten("forward"),
        bw_compiler=compiler.aten("backward"),
        inference_compiler=compiler.aten("inference"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return made(module, inputs)


def _boxed(graph: fx.GraphModule) -> Any:
    from torch._functorch.aot_autograd import make_boxed_func  # pyright: ignore

    return make_boxed_func(graph.forward)


def _ordinary(graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(graph, inputs, **options)


class _Lazily:
    """A graph that Inductor compiles when it is first launched ordinarily."""

    def __init__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any], chosen: _Settings
    ) -> None:
        self._made = (graph, inputs, options, chosen)
        self._crossing, self._device = Crossing.of(graph.graph), _device(graph)
        self._compiled: Any = None

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if self._compiled is None:
            graph, examples, options, chosen = self._made
            with settings(**chosen.inductor):
                self._compiled = _ordinary(graph, examples, options)
        return self._crossing.after(self._compiled(self._crossing.before(inputs)), self._device)


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy that keeps what nodes are known to be; Inductor uses up what it is given."""
    copied = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = copied.output(copied.graph_copy(graph.graph, mapping))
    output.meta = dict(graph.graph.output_node().meta)
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    return fx.GraphModule(graph, copied)


def _touches_cuda(graph: fx.GraphModule) -> bool:
    return _device(graph).type == "cuda"


def _device(graph: fx.GraphModule) -> torch.device:
    """The graph's CUDA device; the host if it has none."""
    devices = (device for node in graph.graph.nodes for device in _devices(node.meta.get("val")))
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


# Higher-order operations that Inductor makes launches of.
_LAUNCHES = ("triton_kernel_wrapper", "auto_functionalized")


def _needs_host(graph: fx.Graph) -> bool:
    """Whether something in a graph cannot be recorded, for which Inductor would wait for the device or use the host."""
    with _described(graph):
        return any(
            host_reason(node) is not None
            for node in graph.nodes
            if is_work(node) and not _is_number(node) and not str(node.target).startswith(_LAUNCHES)
        )


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


@contextlib.contextmanager
def _described(graph: fx.Graph) -> Generator[None, None, None]:
    """Say of every node what it is, as Programs do; sizes that are known at a call count as known."""
    for node in graph.nodes:
        node.meta["spec"] = _spec(node.meta.get("val"))
    try:
        yield
    finally:
        for node in graph.nodes:
            del node.meta["spec"]


def _spec(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if free_unbacked_symbols(value):
            return None
        shape = tuple(-1 if isinstance(n, torch.SymInt) else n for n in value.shape)
        return TensorSpec(shape, (), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(map(_spec, value))
    unknown = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and free_unbacked_symbols(value)
    return None if unknown else ()


def _draws(graph: fx.Graph) -> list[tuple[str, tuple[int, ...]]]:
    """The random draws of a graph, in order: what is drawn, and of which shape."""
    with _described(graph):
        return draws_of(graph)
