"""Selective CUDA Graphs: run each region in the way that was measured to be the fastest.

Source: "selective CUDA Graphs" (SCG), arXiv 2503.19779.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pygraph.errors import StageError, describe
from pygraph.ir.descriptors import Way
from pygraph.ir.program import Program

_MARGINS = ((200.0, 0.97), (0.0, 0.9))
"""From so many µs on, another way must take less than this share of the default's time: smaller differences are noise,
which is larger in short runs."""


def select_program(program: Program, times: Mapping[int, Mapping[Way, float]]) -> Program:
    """Write the fastest way of running into every region that was measured.

    IR before::

        # region 0: graph, patch

    IR after, with 9.0 µs for ordinary launches and 12.0 µs for a replay::

        # region 0: graph, launch

    Args:
        program: A Program at stage ``regions``.
        times: By region, the microseconds of each way of running it.

    Returns:
        A Program whose regions have a ``way`` and the measured ``times``.

    Raises:
        StageError: The Program is not cut into regions yet.

    Example:
        >>> import pygraph, torch
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> program = pygraph.graphify(pygraph.indirect(pygraph.trace(torch.sin)(x)))
        >>> select_program(program, {0: {"launch": 9.0, "patch": 12.0}}).regions[0].way
        'launch'
    """
    check_has_regions(program)
    regions = tuple(
        dataclasses.replace(
            region,
            way=fastest(times[region.index], region.way),
            times=tuple((way, round(time, 3)) for way, time in times[region.index].items()),
        )
        if region.index in times
        else region
        for region in program.regions
    )
    return program.replace(regions=regions, history=(*program.history, "select"))


def fastest(times: Mapping[Way, float], default: Way) -> Way:
    """The way to run in: the default, unless another one is faster by more than measurements vary.

    >>> fastest({"launch": 9.9, "patch": 10.0}, "patch"), fastest({"launch": 5.0, "patch": 10.0}, "patch")
    ('patch', 'launch')
    """
    best = min(times, key=lambda way: times[way])
    margin = next(share for start, share in _MARGINS if times[default] >= start)
    return best if times[best] < margin * times[default] else default


def check_has_regions(program: Program) -> None:
    """Raise StageError unless a Program is cut into regions."""
    if program.stage != "regions":
        raise StageError(
            describe(f"select({program.name})", f"stage {program.stage!r}", expected="'regions'",
                     remedy="Apply graphify first: select(graphify(p)).")
        )  # fmt: skip
