"""From a Python callable to a Program.

The function runs once on fake tensors while a tracer like `make_fx` records the ATen operations below autograd, so that
``torch.func`` transforms, ``torch.autograd.grad`` and random operations inside it become plain operations. That
recording has in-place operations; a second run through ``torch.func.functionalize`` removes them and makes updates
of inputs explicit outputs. Aliasing is read off the first run, where storages are shared as in eager.

Numbers are traced as symbols. One whose value the function needs (an ``if``, a size) is baked in and the trace
repeated; the caller finds its leaf among `Traced.static_leaves`.
"""

# Functions take and return values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pygraph.errors import TraceError, describe
from pygraph.guards.locations import Data, RequiresGrad
from pygraph.ir.autocasting import without_autocast
from pygraph.ir.gradients import differentiated_leaves, free_leaves
from pygraph.ir.program import Program
from pygraph.ir.source_lines import user_line
from pygraph.process.collection import no_collection
from pygraph.tracing.call_environment import reached_besides, with_state_inputs
from pygraph.tracing.data_assignments import drop_idle_reads
from pygraph.tracing.error_frames import preserved_dispatch_state
from pygraph.tracing.function_kinds import Rebinding, Renaming, SelfTracing, Traced
from pygraph.tracing.functionalize import functionalize
from pygraph.tracing.interruptions import uninterrupted
from pygraph.tracing.leaks import leaving_nothing
from pygraph.tracing.recording import Recording
from pygraph.tracing.specialization import record_specialized
from pygraph.tracing.torch_errors import in_words
from pygraph.tracing.turn import turn


def trace_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    static: frozenset[int] = frozenset(),
    name: str | None = None,
) -> Traced:
    """Trace one call.

    Args:
        fn: The function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        static: Leaves of numbers that are baked in from the start.
        name: What errors and reports call the function; by default, its name.

    Raises:
        TraceError: The function cannot be traced; the message says why and where.
    """
    name = str(name or getattr(fn, "__name__", type(fn).__name__))
    if isinstance(fn, SelfTracing):
        return fn.trace(args, kwargs, static, name)
    # Handlers of signals wait until nothing of the trace is left.
    return uninterrupted(
        lambda: leaving_nothing(f"trace({name})(…)", lambda: _trace_call(fn, args, kwargs, static, name))
    )


def _trace_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str
) -> Traced:
    differentiated = differentiated_leaves(args, kwargs)
    with turn(), no_collection(), preserved_dispatch_state():
        recording, static = record_specialized(fn, args, kwargs, static, name)
        outer = with_state_inputs(fn)
        inputs = {id(tensor) for tensor in outer.differentiated} if outer is not None else set[int]()
        if outer is not None:
            drop_idle_reads(recording.module, outer.locations)
        read = [tensor for tensor in recording.gradients if id(tensor) not in inputs]
        now = reached_besides(fn, args, kwargs, read, recording.toggled, hooks=recording.differentiates)
        try:
            program = _functional(recording)
        except TraceError:
            if not recording.positions:
                raise
            # There may be no operation by an index for a dtype; views at known positions are those of eager.
            return _trace_call(fn, args, kwargs, static | recording.positions, name)
        program = program.replace(gradients=free_leaves(program, differentiated))
        if isinstance(fn, Renaming):
            program = _with_paths(program, fn.path)
        if isinstance(fn, Rebinding):
            now.release(fn.rebound())
            fn.check(program)
        now.guard_tensors(_unread(program, recording.looked_at, fn))
        return Traced(program, static, now, recording.used)


def _unread(program: Program, looked_at: Iterable[torch.Tensor], fn: Any) -> list[torch.Tensor]:
    """The tensors that a function has looked at and that its Program does not read, nor takes as inputs."""
    read = {id(getattr(program.module, str(node.target), None)) for node in program.nodes if node.op == "get_attr"}
    if isinstance(fn, Rebinding):
        read |= set(map(id, fn.rebound()))
    outer = with_state_inputs(fn)
    if outer is not None:
        read |= {id(location.tensor()) for location in outer.locations if isinstance(location, (Data, RequiresGrad))}
    return [tensor for tensor in looked_at if id(tensor) not in read]


def _functional(recording: Recording) -> Program:
    """Functionalize a recording, with torch's errors as TraceErrors."""
    try:
        with without_autocast():
            return functionalize(recording)
    except TraceError:
        raise
    except Exception as error:
        problem, remedy = in_words(error)
        text = describe(f"trace({recording.name})(…)", problem, source=user_line(error), remedy=remedy)
        raise TraceError(text) from error


def _with_paths(program: Program, path: Callable[[str], str]) -> Program:
    """Rename the arguments and results of a Program, as errors and reports call them."""

    def renamed(descriptor: Any) -> Any:
        named = hasattr(descriptor, "path") and descriptor.path.startswith(("args", "result"))
        return dataclasses.replace(descriptor, path=path(descriptor.path)) if named else descriptor

    used = tuple(baked for baked in program.baked if path(baked.path))
    program = program.replace(baked=used)
    fields = ("inputs", "outputs", "aliases", "statics", "baked")
    return program.replace(**{field: tuple(map(renamed, getattr(program, field))) for field in fields})
