"""Measuring a Program on made-up arguments, for `select` of a Program that no call has been made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pygraph.calls.recording import record_program
from pygraph.errors import StageError, describe
from pygraph.ir.descriptors import Argument, Base, Element, Fallback, ScalarArgument
from pygraph.ir.effects import is_load
from pygraph.ir.evaluate import argument_descriptors
from pygraph.ir.program import Program
from pygraph.process import progress
from pygraph.runtime.devices import driver_for
from pygraph.runtime.indices import Reach, index_reach
from pygraph.runtime.selecting import DEFAULT_POLICY, SelectionPolicy
from pygraph.transforms.select import check_has_regions


def measured_program(program: Program, *, policy: SelectionPolicy = DEFAULT_POLICY) -> Program:
    """Measure every graph region of a Program on made-up arguments, and choose the fastest way for each.

    Args:
        program: A Program at stage ``regions``.
        policy: How to select, as `pygraph.select` describes it.

    Returns:
        A Program whose regions have a ``way`` and the measured ``times``; as it was, with the reason among its
        ``fallbacks``, if it computes indices from its arguments: only those of a call are known to be in range.

    Raises:
        StageError: The Program is not cut into regions yet.
    """
    check_has_regions(program)
    driver = driver_for(program.device)
    if driver is None:
        return program.replace(history=(*program.history, "select"))
    reason = _why_not_made_up(program)
    if reason is not None:
        return program.replace(fallbacks=(*program.fallbacks, reason), history=(*program.history, "select"))
    leaves = example_leaves(program)
    with progress.compiling(program.name):
        executable = record_program(program, driver, driver.new_pool(), leaves, policy=policy)
    executable.release()
    return executable.program


def _why_not_made_up(program: Program) -> Fallback | None:
    """Why a Program cannot run on made-up arguments: one of them would become an index that no call may have."""
    reach = index_reach(program.nodes)
    for node, descriptor in _arguments(program):
        is_number = not isinstance(descriptor, Argument)
        if reach.get(node, Reach.NOT) > (Reach.NOT if is_number else Reach.UNCHANGED):
            lines = [user.meta["source"] for user in node.users if user.meta.get("source")]
            return Fallback(
                "select",
                f"an index is computed from {descriptor.path}, and of made-up arguments it may be out of range; "
                "apply select to the function, which measures with those of a call",
                lines[0] if lines else None,
            )
    return None


def _arguments(program: Program) -> list[tuple[fx.Node, Argument | ScalarArgument | Element]]:
    """The nodes that are arguments, the numbers in them, or are loaded from where one is."""
    found: list[tuple[fx.Node, Any]] = list(zip(program.placeholders, program.inputs, strict=True))
    if program.table is not None:
        found += [(node, program.table.slots[node.args[1]].of) for node in program.nodes if is_load(node)]  # pyright: ignore
    return [
        (node, one)
        for node, one in found
        if isinstance(one, (Argument, ScalarArgument)) or (isinstance(one, Element) and isinstance(one.of, Argument))
    ]


def example_leaves(program: Program) -> list[Any]:
    """Arguments that fit a Program: random floating-point numbers; zeros for integers and for what is an index."""
    leaves: list[Any] = [None] * program.in_tree.num_leaves
    table = program.table
    bases = [d for d in program.inputs if isinstance(d, Base)]
    bases += [slot.of for slot in (table.slots if table is not None else ()) if isinstance(slot.of, Base)]
    if bases:
        raise StageError(
            describe(f"select({program.name})", "its arguments overlap", remedy="Apply select to the function.")
        )
    reach = index_reach(program.nodes)
    used_as_indices = [descriptor for node, descriptor in _arguments(program) if reach.get(node)]
    indices = {(one.of if isinstance(one, Element) else one).leaf for one in used_as_indices}  # pyright: ignore
    for descriptor in argument_descriptors(program):
        if isinstance(descriptor, ScalarArgument):
            leaves[descriptor.leaf] = descriptor.type(1)
            continue
        tensor = descriptor.spec.empty()
        flat = tensor.as_strided((descriptor.spec.span,), (1,))
        is_index = descriptor.leaf in indices
        if not is_index and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            flat.copy_(torch.randn(flat.shape, dtype=torch.float32, device="cpu").to(flat.dtype))
        else:
            flat.zero_()
        leaves[descriptor.leaf] = tensor
    return leaves
