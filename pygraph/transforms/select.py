"""Selective CUDA Graphs: run each region in the way that was measured to be the fastest.

Source: "selective CUDA Graphs" (SCG), arXiv 2503.19779.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pygraph.errors import StageError, describe
from pygraph.ir.program import Program
from pygraph.ir.selections import Selection


def select_program(program: Program, selections: Mapping[int, Selection]) -> Program:
    """Write the way of running that was selected into every region.

    IR before::

        # region 0: graph, patch

    IR after, with 9.0 µs for ordinary launches and 12.0 µs for a replay::

        # region 0: graph, launch

    Args:
        program: A Program at stage ``regions``.
        selections: By region, the selection.

    Returns:
        A Program whose regions have a ``way``, their ``selection``, and its ``times``.

    Raises:
        StageError: The Program is not cut into regions yet.

    Example:
        >>> import pygraph, torch
        >>> from pygraph.ir.selections import Candidate
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> program = pygraph.graphify(pygraph.indirect(pygraph.trace(torch.sin)(x)))
        >>> select_program(program, {0: Selection(Candidate("launch"), "it was the fastest")}).regions[0].way
        'launch'
    """
    check_has_regions(program)
    regions = tuple(
        dataclasses.replace(region, way=found.chosen.way, times=found.times(), selection=found)
        if (found := selections.get(region.index)) is not None
        else region
        for region in program.regions
    )
    history = program.history if program.history[-1:] == ("select",) else (*program.history, "select")
    return program.replace(regions=regions, history=history)


def launched_program(program: Program, reason: str) -> Program:
    """Have every graph region run by ordinary launches, for a reason.

    Example:
        >>> import pygraph, torch
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> program = pygraph.graphify(pygraph.indirect(pygraph.trace(torch.sin)(x)))
        >>> launched_program(program, "the mode is launch").regions[0].way
        'launch'
    """
    check_has_regions(program)
    regions = tuple(
        dataclasses.replace(region, way="launch", reason=reason) if region.way != "launch" else region
        for region in program.regions
    )
    return program.replace(regions=regions, history=(*program.history, "select"))


def check_has_regions(program: Program) -> None:
    """Raise StageError unless a Program is cut into regions."""
    if program.stage != "regions":
        raise StageError(
            describe(f"select({program.name})", f"stage {program.stage!r}", expected="'regions'",
                     remedy="Apply graphify first: select(graphify(p)).")
        )  # fmt: skip
