"""Recording the graphs of a Program: what the device refuses is cut out, and ways of running are chosen by measuring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pygraph.ir.program import Program
from pygraph.runtime.driver import Driver, Pool
from pygraph.runtime.executable import Executable, RefusedNodesError, Timer, Timing
from pygraph.runtime.reuse import ReusedMemory
from pygraph.transforms.graphify import refuse
from pygraph.transforms.select import fastest, select_program


def record_program(
    program: Program,
    driver: Driver,
    pool: Pool,
    leaves: Sequence[Any],
    reused: ReusedMemory | None = None,
    timer: Timer | None = None,
) -> Executable:
    """Record the graphs of a Program.

    Args:
        program: A Program at stage ``regions``. Nodes that the device refuses to record are cut out of its graphs.
        driver: The device.
        pool: Memory that the graphs share with others of the same function.
        leaves: The leaves of ``(args, kwargs)`` of a call, as examples; they are not changed.
        reused: Where graphs that write results to the same memory at every call say so; None for fresh results.
        timer: Microseconds of one ``run()``. With it, every region runs in the way that is the fastest by it.

    Returns:
        The executable; its Program is the one that runs.
    """
    timing = None if timer is None else Timing(timer, fastest)
    while True:
        try:
            executable = Executable(program, driver, pool, leaves, reused, timing)
            break
        except RefusedNodesError as error:
            program = refuse(error.program, error.nodes, error.reason)
    if timing is not None:
        executable.run_as(select_program(executable.program, executable.times))
    return executable
