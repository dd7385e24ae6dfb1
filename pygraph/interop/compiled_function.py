"""AOTAutograd's autograd function of a plain training graph, applied without the wrappers around it.

The first call goes AOTAutograd's way, and shows its function: the ``grad_fn`` of a result leads to it. If the graph is
plain, later calls apply a subclass, whose forward and backward do what is left to do. A backward that is not an
ordinary one runs the inherited code, on the same context. So saved tensors, hooks, checks of versions and errors are
torch's own, and compiled autograd finds the attributes that it reads.
"""

# AOTAutograd's function and torch's flags have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensor

from pygraph.interop.boxed import BoxedReplay
from pygraph.interop.plain_graphs import PlainGraph, is_plain_input

_unsafe_view = torch.ops.aten._unsafe_view.default
_saved_tensor_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
_keeps_graph: Any = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore[reportAttributeAccessIssue]
_active_transforms: Any = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]


def without_wrappers(compiled: Callable[..., Any], replay: BoxedReplay) -> Callable[..., Any]:
    """Call a training graph without AOTAutograd's wrappers once the first call has shown that it is plain.

    Args:
        compiled: The graph as AOTAutograd has compiled it just now, with autocast and hooks of saved tensors as now.
        replay: Its compiled forward.

    Returns:
        A function like ``compiled``.
    """
    if config.debug_assert or _saved_tensor_hooks(True) is not None:
        return compiled  # which checks more, or has the hooks in the graph
    disables_autocast: bool = torch._C._is_any_autocast_enabled()
    apply: Callable[..., Any] | None = None
    is_known = False

    def call(*args: Any) -> Any:
        nonlocal apply, is_known
        if apply is not None and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            return apply(*args)
        results = compiled(*args)
        if not is_known:
            is_known = not any(
                isinstance(value, FakeTensor) for value in args
            )  # as Dynamo calls it to split it for DDP
            graph = _plain_graph(args, results, replay)
            apply = None if graph is None else _application(graph, replay, disables_autocast)
        return results

    return call


def _plain_graph(args: Sequence[Any], results: Any, replay: BoxedReplay) -> PlainGraph | None:
    """The graph that a call has run with this forward, if it is plain."""
    if not all(map(is_plain_input, args)):
        return None
    for result in results:
        node = getattr(result, "grad_fn", None)
        if _forward_of(getattr(node, "_forward_cls", None)) is replay:
            return PlainGraph.of(node, args)
    return None


def _forward_of(function: Any) -> Any:
    """The compiled forward that AOTAutograd's function calls.

    What wraps it is for functionalised random numbers, of which plain graphs have none, or for a first call with fake
    tensors.
    """
    forward = inspect.unwrap(getattr(function, "compiled_fw", _no_forward))
    return getattr(forward, "replayed", forward)  # of a `ReplayedGraph`


def _no_forward() -> None:
    return None


def _application(graph: PlainGraph, replay: BoxedReplay, disables_autocast: bool) -> Callable[..., Any]:
    """A function of all inputs that does what AOTAutograd does around its function, and applies a subclass of that."""
    function: Any = _subclass(graph, replay, disables_autocast)
    # The public `apply` looks for transforms of ``torch.func``, and in all inputs for tensors of those that are over.
    base: Any = super(torch.autograd.Function, function)
    apply: Callable[..., Any] = base.apply
    if not graph.updated and not graph.detached:
        return apply

    def call(*args: Any) -> Any:
        torch.autograd.graph.increment_version([args[index] for index in graph.updated])
        inputs = list(args)
        for index in graph.detached:
            inputs[index] = inputs[index].detach()
        return apply(*inputs)

    return call


def _subclass(graph: PlainGraph, replay: BoxedReplay, disables_autocast: bool) -> type[torch.autograd.Function]:
    """AOTAutograd's function with the forward and backward of a plain graph."""
    inherited = graph.function
    grads_are_listed: bool = getattr(inherited, "boxed_grads_call", False)  # new in torch 2.13
    run_forward = _without_autocast(replay) if disables_autocast else replay

    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        results = run_forward(list(args))
        _save(ctx, results[graph.returned :], graph.unchecked)
        ctx._materialize_non_diff_grads = False
        if not graph.unsafe_views and not graph.constant:
            return tuple(results[: graph.returned])
        returned = list(results[: graph.returned])
        for index in graph.unsafe_views:
            returned[index] = _unsafe_view(returned[index], returned[index].shape)
        ctx.mark_non_differentiable(*[returned[index] for index in graph.constant])
        return tuple(returned)

    def backward(ctx: Any, *args: Any) -> Any:
        grads: Any = args[0] if grads_are_listed else args
        run = _backward_of(inherited)
        tangents = None if run is None or _is_special(graph) else _tangents(graph, grads)
        if run is None or tangents is None:
            return inherited.backward(ctx, *args)
        values = [*ctx.saved_tensors, *ctx._tensors_no_vc_check, *tangents]
        del tangents
        if grads_are_listed:
            grads.clear()  # so that backward may free them
        ctx.maybe_clear_saved_tensors()
        if disables_autocast:
            run = _without_autocast(run)
        # Since torch 2.13, a thread of the autograd engine runs in the context of the thread that has called it.
        context = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else None
        return tuple(run(values) if context is None else context.run(run, values))

    class CompiledFunction(inherited):  # its name is part of errors, and of the names of nodes
        pass

    CompiledFunction.forward = staticmethod(forward)
    # The engine may call it within a function that Dynamo runs, which would try to compile it.
    CompiledFunction.backward = staticmethod(torch.compiler.disable(backward))
    return CompiledFunction


def _save(ctx: Any, tensors: Sequence[Any], unchecked: int) -> None:
    """Save tensors for backward where AOTAutograd does; those that are views without their base."""
    saved = [tensor.detach() if tensor._is_view() else tensor for tensor in tensors]
    checked = len(saved) - unchecked
    ctx.save_for_backward(*saved[:checked])
    ctx._tensors_no_vc_check = saved[checked:]
    ctx.symints = []
    ctx.opaque_objects = []


def _without_autocast(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    def call(inputs: list[Any]) -> Sequence[Any]:
        with torch._C._DisableAutocast():
            return run(inputs)

    return call


def _backward_of(function: Any) -> Callable[[list[Any]], Sequence[Any]] | None:
    """The compiled backward, which `torch.compiler.disable` has wrapped; None before the first backward compiles it."""
    run = function.compiled_bw
    return getattr(run, "_torchdynamo_orig_callable", run) if getattr(run, "_boxed_call", False) else None


def _is_special(graph: PlainGraph) -> bool:
    """Whether AOTAutograd makes more of a backward: errors, for the most part."""
    return (
        torch.is_grad_enabled()
        or _keeps_graph()
        or _active_transforms() is not None
        or (graph.is_nondeterministic and torch.are_deterministic_algorithms_enabled())
    )


def _tangents(graph: PlainGraph, grads: Sequence[Any]) -> list[Any] | None:
    """The tangents that backward takes, if they have the layouts for which it was compiled."""
    tangents: list[Any] = []
    for index, expected in graph.tangents:
        tangent = grads[index]
        if type(tangent) is not torch.Tensor:
            return None
        if expected.memory_format is not None:
            fits = tangent.is_contiguous(memory_format=expected.memory_format)
        else:
            fits = tangent.shape == expected.size and tangent.stride() == expected.stride
        if not fits:
            return None
        tangents.append(tangent)
    return tangents
