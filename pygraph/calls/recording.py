"""Recording the graphs of a Program: refused nodes are cut out, and ways of running are chosen by measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pygraph.calls.cache import Shared
from pygraph.calls.donation import Donation
from pygraph.calls.function import Function
from pygraph.ir.descriptors import Fallback
from pygraph.ir.program import Program
from pygraph.process import extension
from pygraph.process.collection import collection_postponed
from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import Driver, Pool
from pygraph.runtime.executable import Executable, RefusedNodesError, Timer, Timing
from pygraph.runtime.reuse import ReusedMemory
from pygraph.tracing.interruptions import uninterrupted
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
    timing = None if timer is None else Timing(timer, fastest, varies=timer == driver.measure)
    while True:
        try:
            executable = Executable(program, driver, pool, leaves, reused, timing)
            break
        except RefusedNodesError as error:
            program = refuse(error.program, error.nodes, error.reason)
    if timing is not None:
        executable.run_as(select_program(executable.program, executable.times))
    return executable


class Recorder:
    """Records the Programs of one function.

    Args:
        function: The function.
        shared: The memory of its graphs, and what is counted of them.

    Attributes:
        reused: The memory that all calls write their results to; None if every call has fresh results.
        donation: The arguments that calls consume, whose memory results may take over; None if there are none.
    """

    def __init__(self, function: Function, shared: Shared) -> None:
        self._function, self._shared = function, shared
        self.reused = ReusedMemory() if function.options.reuse_outputs else None
        self.donation: Donation | None = None

    def record(self, program: Program, leaves: list[Any]) -> Executable | None:
        """Record the graphs of a Program; None where nothing can be recorded.

        Args:
            program: A Program that went through the passes of the function.
            leaves: The leaves of ``(args, kwargs)`` of a call, as examples.
        """
        if not self._function.records or program.device.type == "cpu" or len(program.devices) > 1:
            return None
        driver = driver_for(program.device)
        if driver is None or driver.refusal() is not None:
            return None
        pools = self._shared.pools
        if program.device not in pools:
            pools[program.device] = driver.new_pool()
        is_measured = any(one.is_measured for one in self._function.passes)
        timer = (self._function.options.timer or driver.measure) if is_measured else None
        pool, made = pools[program.device], list[Executable]()

        def record() -> None:
            made.append(record_program(program, driver, pool, leaves, self.reused, timer))

        try:
            with driver.unwatched(), collection_postponed():
                uninterrupted(record, recording=True)
        except BaseException:
            for executable in made:  # what raises is a signal's handler that has waited
                executable.release()
            raise
        (executable,) = made
        extension.start()
        self._shared.counts.captures += executable.recorded
        if self.donation is not None and executable.graphs:
            executable.adopt(self.donation.leaves(program), leaves, self.donation.notes)
        if executable.recorded:
            driver.give_back()  # what trials have used, which lies on other streams and in pieces of other sizes
        return executable

    def reasons(self, program: Program) -> list[Fallback]:
        """Why nothing of a Program was recorded."""
        driver = driver_for(program.device) if self._function.records else None
        refusal = None if driver is None else driver.refusal()
        return [*program.fallbacks, *([] if refusal is None else [Fallback("the whole program", refusal)])]
