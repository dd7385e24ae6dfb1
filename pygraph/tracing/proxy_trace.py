"""Tracing of a function's operations to an FX graph that changes nothing for other threads.

``torch.fx.experimental.proxy_tensor.make_fx`` records operations by a dispatch mode, which is thread-local. But it runs
FX's symbolic tracer around it, which replaces ``nn.Module.__call__`` and ``__getattr__``, sets a flag that makes every
compiled function raise an error, and sets the tracer of control flow, all for the whole process. None of it is needed
to record operations: here the function is simply called. Where torch reads state of the whole process, it gets that of
the thread, by `tracing_here` and `session_here`.
"""

# torch has no public names for any of this. Checked with torch 2.13; tests/unit/tracing/test_proxy_trace.py says what
# another version has not.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import fx
from torch._compile import _disable_dynamo
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import is_accessor_node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pygraph.errors import TraceError
from pygraph.tracing.unrolled_scans import UnrolledScans


class _Here(threading.local):
    session: Session | None = None


_here = _Here()

# A mode of fake tensors has the trace under way as an attribute: torch gives modes to autograd's threads too.
_SESSION = "pygraph_session"


def proxy_trace(function: Callable[..., Any], values: list[Any]) -> fx.GraphModule:
    """Call a function on tensors and symbols, and return the operations that it does as a graph.

    Args:
        function: A function of as many arguments.
        values: Tensors and symbols.

    Returns:
        What ``make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*values)`` returns.
    """
    return Session().trace(function, *values)


def session_here() -> Session | None:
    """The innermost trace of ours that this thread is in; for a thread of autograd, that of the thread that waits."""
    if _here.session is not None:
        return _here.session
    found = (vars(mode).get(_SESSION) for mode in reversed(_get_current_dispatch_mode_stack()))
    return next((session for session in found if session is not None), None)


def tracing_here() -> bool:
    """Whether this thread is inside a trace of ours, and not in `outside_session`."""
    return session_here() is not None


@contextlib.contextmanager
def outside_session() -> Generator[None, None, None]:
    """Leave the trace of ours for the time of the context; its modes stay active."""
    session, _here.session = _here.session, None
    try:
        yield
    finally:
        _here.session = session


class Session(proxy_tensor._MakefxTracer):
    """One call of `proxy_trace`, or the trace of a branch of control flow inside it.

    Higher-order operations as ``torch.cond`` ask the current tracer to trace their branches.
    """

    def __init__(self, decompositions: Any = None) -> None:
        super().__init__(
            decompositions, "real", _allow_non_fake_inputs=True, pre_dispatch=False, record_module_stack=False,
            _allow_fake_constant=False, _error_on_data_dependent_ops=True,
        )  # fmt: skip

    def _make_sub_tracer(self, decomp_table: Any = None, *args: Any, **kwargs: Any) -> Session:
        del args, kwargs
        sub = Session(self.decomposition_table if decomp_table is None else decomp_table)
        sub.parent_tracer = self
        return sub

    def trace_subgraph(self, f: Callable[..., Any], *args: object) -> fx.GraphModule:
        """Trace a branch, by a tracer of this class."""
        sub = self._make_sub_tracer()
        with sub._init_modes_from_parent(self), UnrolledScans():
            return sub._trace_inner(f, *args)

    def trace_subgraph_custom_decomp(self, f: Callable[..., Any], decomp_table: Any, *args: object) -> fx.GraphModule:
        """Trace a branch with decompositions of its own."""
        sub = self._make_sub_tracer(decomp_table)
        with sub._init_modes_from_parent(self), UnrolledScans():
            return sub._trace_inner(f, *args)

    def _trace_inner(self, f: Callable[..., Any], *args: object) -> fx.GraphModule:
        import torch._dynamo  # which must not be imported first under modes  # noqa: F401  # pyright: ignore

        tracer: Any = self.fx_tracer
        # Not the mode that notes functions in nodes: Dynamo traces control flow under vmap where it is off only.
        modes: tuple[Any, ...] = (
            self.python_dispatcher_mode, self.proxy_function_mode, self.proxy_mode,
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._found())
            for mode in modes:
                stack.enter_context(mode)
            stack.enter_context(proxy_tensor.disable_autocast_cache())
            module = _traced(f, args, tracer)
        if self.parent_tracer is not None:
            self._assert_later(module, args)
        return module

    @contextlib.contextmanager
    def _found(self) -> Generator[None, None, None]:
        """Make this the session of `session_here` for the time of the context."""
        fakes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)]
        before, of_fakes = _here.session, [vars(mode).get(_SESSION) for mode in fakes]
        try:
            _here.session = self
            for mode in fakes:
                setattr(mode, _SESSION, self)
            yield
        finally:
            _here.session = before
            for mode, session in zip(fakes, of_fakes, strict=True):
                setattr(mode, _SESSION, session)

    @staticmethod
    def _assert_later(module: fx.GraphModule, args: tuple[object, ...]) -> None:
        """Add assertions for assumptions on numbers that only a run knows to a branch, as torch does."""
        from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

        mode = detect_fake_mode(args)
        if mode is not None and mode.shape_env is not None:
            insert_deferred_runtime_asserts(module, mode.shape_env, "reenter_make_fx")
            module.recompile()


@_disable_dynamo
def _traced(function: Callable[..., Any], values: tuple[Any, ...], tracer: Any) -> fx.GraphModule:
    """Call the function under the modes of a trace, between the placeholders and the output of a new graph."""
    if any(not pytree.tree_structure(value).is_leaf() for value in values):
        raise TraceError("a branch of control flow takes a container")
    tracer.root = torch.nn.Module()
    tracer.graph = fx.Graph(tracer_cls=type(tracer))
    tracer.tensor_attrs = {}
    tracer.submodule_paths = None
    placeholders = [tracer.create_proxy("placeholder", f"arg{i}_1", (), {}) for i in range(len(values))]
    wrapped: Any = proxy_tensor.wrap_key(function, values, tracer, False)
    tracer.create_arg = _with_generators(tracer)
    try:
        out = wrapped(*placeholders)
    finally:
        del tracer.create_arg  # its class has one too
    tracer.create_node("output", "output", (tracer.create_arg(out),), {})
    graph: fx.Graph = tracer.graph
    graph.eliminate_dead_code(_has_effects)
    from torch._inductor.fx_passes.dedupe_symint_uses import dedupe_symints

    dedupe_symints(graph)
    return _LazyGraphModule(tracer.root, graph, getattr(function, "__name__", "traced"))  # most are never run


def _with_generators(tracer: Any) -> Callable[[Any], Any]:
    """A tracer's function that makes an argument of a value, for random generators too, which torch 2.11 refuses.

    They become attributes, one for each generator: operations get other Python objects for the same.
    """
    create_arg: Callable[[Any], Any] = tracer.create_arg
    names: dict[int, str] = {}

    def with_generators(value: Any) -> Any:
        if not isinstance(value, torch._C.Generator):
            return create_arg(value)
        generator: Any = value
        name = names.setdefault(generator._cdata, f"_generator{len(names)}")
        setattr(tracer.root, name, value)
        return tracer.create_node("get_attr", name, (), {})

    return with_generators


def _has_effects(node: fx.Node) -> bool:
    """Whether a node stays without users; size queries and arithmetic of numbers do not."""
    if node.is_impure():
        return True
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
    of_numbers = all(isinstance(one.meta.get("val"), numbers) for one in (node, *operands))
    return not (is_accessor_node(node) or of_numbers)
