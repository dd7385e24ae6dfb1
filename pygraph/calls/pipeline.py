"""From a function and a call's arguments to the Program that is recorded: a trace, and the passes of its stack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from pygraph.calls.options import Options
from pygraph.guards.environment import Environment
from pygraph.ir.check import check_program
from pygraph.ir.descriptors import Argument, Base, Captured, Fallback
from pygraph.ir.program import Program
from pygraph.ir.value_names import with_value_names
from pygraph.lowering.aten import lower
from pygraph.lowering.inductor import ALIGNED
from pygraph.lowering.run_cache import start_workers_early
from pygraph.process import progress
from pygraph.process.collection import collection_postponed
from pygraph.process.log import log
from pygraph.tracing.function_kinds import Traced
from pygraph.tracing.trace import trace_call
from pygraph.transforms.passes import FUSE, Pass, records


def transformed_program(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: frozenset[int],
    name: str,
    passes: tuple[Pass, ...],
    options: Options,
    needed_values: Collection[str] = (),
) -> tuple[Traced, Program]:
    """Trace a function for one call and apply passes; numbers that an operation of the device needs are baked in.

    Args:
        fn: The function.
        args: The arguments of a call.
        kwargs: Its keyword arguments.
        static: Positions of leaves that are baked in.
        name: What errors and reports call the function.
        passes: The passes, without the measurements of those that take any.
        options: The options of the stack.
        needed_values: Names of values that other traces go on with, see `pygraph.ir.value_names`.

    Returns:
        The trace, and the Program that the passes made of it.

    Raises:
        TraceError: The function cannot be traced with these arguments.
    """
    if FUSE in passes:
        start_workers_early()
    while True:
        progress.phase("tracing")
        with collection_postponed():
            traced = trace_call(fn, args, kwargs, static=static, name=name)
            program = check_program(with_value_names(traced.program, needed_values))
        log.debug("%s: traced, as %d nodes", name, len(program.module.graph.nodes))
        for one in passes:
            if one.is_measured or program.stage not in one.takes:
                continue
            # Inductor makes so much garbage where it compiles that it is not to wait.
            with collection_postponed() if one is not FUSE else contextlib.nullcontext():
                program = _apply(one, program, args, kwargs, options)
            needed = one.left_on_host(program) if one.left_on_host is not None and records(passes) else set[int]()
            if needed:
                static = traced.static_leaves | _leaves_of(program, needed)
                break
        else:
            return traced, program


def _apply(one: Pass, program: Program, args: Any, kwargs: Any, options: Options) -> Program:
    if one is FUSE:
        note = _misaligned_storage(program, pytree.tree_leaves((args, kwargs)))
        if note is not None:
            return check_program(lower(program.replace(fallbacks=(*program.fallbacks, note))))
    return one(program, **{option: getattr(options, option) for option in one.options})


def _misaligned_storage(program: Program, leaves: Sequence[Any]) -> Fallback | None:
    """Why a Program is not fused: fused kernels read tensors where their offset in their storage says that they are."""
    tensors = [(d.path, d.spec, leaves[d.leaf]) for d in program.inputs if isinstance(d, Argument)]
    tensors += [(d.path, d.spec, leaves[d.start]) for d in program.inputs if isinstance(d, Base)]
    tensors += [(d.name, d.spec, d.value) for d in program.inputs if isinstance(d, Captured)]
    for path, spec, tensor in tensors:
        first = tensor.data_ptr() - spec.offset * tensor.element_size() if tensor.is_cuda and tensor.numel() else 0
        if first % ALIGNED:
            return Fallback("fusion", f"the storage of {path} does not begin at a multiple of {ALIGNED} bytes")
    return None


def _leaves_of(program: Program, inputs: set[int]) -> frozenset[int]:
    return frozenset(program.inputs[index].leaf for index in inputs)  # pyright: ignore


def with_unguarded_state(program: Program, environment: Environment) -> Program:
    """The Program, with a note of what the function reaches and is not guarded."""
    if environment.unseen is None:
        return program
    reason = f"what lies in {environment.unseen} is too much to be looked at; changes there would be missed"
    note = Fallback("state", reason)
    return program if note in program.fallbacks else program.replace(fallbacks=(*program.fallbacks, note))
