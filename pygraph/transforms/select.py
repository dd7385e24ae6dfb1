"""Selective CUDA Graphs: run each region in the way that was measured to be the fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pygraph.errors import StageError, describe
from pygraph.evaluate import argument_descriptors
from pygraph.program import Base, Program, ScalarArgument
from pygraph.runtime.devices import driver_for
from pygraph.runtime.executable import Executable


def select_program(program: Program, *, timer: Callable[[Callable[[], object]], float] | None = None) -> Program:
    """Measure every graph region of a Program on made-up arguments and write the choice into it.

    IR before::

        # region 0: graph, patch

    IR after::

        # region 0: graph, launch

    Args:
        program: A Program at stage ``regions``.
        timer: Microseconds of one ``run()``; the device's own measurement by default.

    Returns:
        A Program whose regions have a ``way`` and the measured ``times``.

    Raises:
        StageError: The Program is not cut into regions yet.

    Source: "selective CUDA Graphs" (SCG), arXiv 2503.19779.
    """
    if program.stage != "regions":
        raise StageError(
            describe(f"select({program.name})", f"stage {program.stage!r}", expected="'regions'",
                     remedy="Apply graphify first: select(graphify(p)).")
        )  # fmt: skip
    driver = driver_for(program.device)
    if driver is None:
        return program.replace(history=(*program.history, "select"))
    leaves = example_leaves(program)
    executable = Executable(program, driver, driver.new_pool(), leaves, timer=timer or driver.measure)
    executable.release()
    return executable.program


def example_leaves(program: Program) -> list[Any]:
    """Arguments that fit a Program: random floating-point numbers, zeros elsewhere (which any index may be)."""
    leaves: list[Any] = [None] * program.in_tree.num_leaves
    table = program.table
    bases = [d for d in program.inputs if isinstance(d, Base)]
    bases += [slot.of for slot in (table.slots if table is not None else ()) if isinstance(slot.of, Base)]
    if bases:
        raise StageError(
            describe(f"select({program.name})", "its arguments overlap", remedy="Apply select to the function.")
        )
    for descriptor in argument_descriptors(program):
        if isinstance(descriptor, ScalarArgument):
            leaves[descriptor.leaf] = descriptor.type(1)
            continue
        tensor = descriptor.spec.empty()
        flat = tensor.as_strided((descriptor.spec.span,), (1,))
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            flat.copy_(torch.randn(flat.shape, dtype=torch.float32).to(flat.dtype))
        else:
            flat.zero_()
        leaves[descriptor.leaf] = tensor
    return leaves
