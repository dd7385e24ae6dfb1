"""Recording the graphs of a Program: refused nodes are cut out, and ways of running are chosen by measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pygraph.calls.cache import Shared
from pygraph.calls.donation import Donation
from pygraph.calls.entries import Recorded
from pygraph.calls.function import Function
from pygraph.calls.remembered import Remembered
from pygraph.calls.whole import select_whole
from pygraph.errors import CaptureError
from pygraph.ir.descriptors import Fallback
from pygraph.ir.program import Program
from pygraph.process import extension
from pygraph.process.collection import collection_postponed
from pygraph.process.log import log
from pygraph.runtime.common_graphs import CommonGraphs
from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import Driver, InterruptedCaptureError, Pool
from pygraph.runtime.executable import Executable, RefusedNodesError
from pygraph.runtime.reuse import ReusedMemory
from pygraph.runtime.selecting import Selecting, SelectionPolicy
from pygraph.tracing.interruptions import uninterrupted
from pygraph.transforms.graphify import refuse
from pygraph.transforms.select import launched_program, select_program


def record_program(
    program: Program,
    driver: Driver,
    pool: Pool,
    leaves: Sequence[Any],
    reused: ReusedMemory | None = None,
    policy: SelectionPolicy | None = None,
    common: CommonGraphs | None = None,
) -> Executable:
    """Record the graphs of a Program.

    Args:
        program: A Program at stage ``regions``. Nodes that the device refuses to record are cut out of its graphs.
        driver: The device.
        pool: Memory that the graphs share with others of the same function.
        leaves: The leaves of ``(args, kwargs)`` of a call, as examples; they are not changed.
        reused: Where graphs that write results to the same memory at every call say so; None for fresh results.
        policy: How to select in which way every region runs; None to have it run as the Program says.
        common: Graphs of other Programs of the same function, which regions like theirs run as well.

    Returns:
        The executable; its Program is the one that runs.
    """
    if policy is not None and policy.mode == "launch":
        return Executable(launched_program(program, "the mode is launch"), driver, pool, leaves, reused)
    store = selecting = None
    regions = 0
    if policy is not None and policy.mode != "replay":
        selecting = Selecting(policy)
        store = Remembered.of(program, driver, policy)
        if store is not None:
            regions, selecting.remembered = store.read()
            log.debug("selections on disk: %s (%s)", "found" if selecting.remembered else "none yet", store.path)
    while True:
        # The regions that are remembered are those that there are when all nodes are cut out that the device refuses.
        are_those = selecting is None or not selecting.remembered or len(program.regions) == regions
        try:
            executable = Executable(program, driver, pool, leaves, reused, selecting if are_those else None, common)
            break
        except RefusedNodesError as error:
            program = refuse(error.program, error.nodes, error.reason)
    if policy is not None:
        program = executable.program
        executable.run_as(select_program(program, executable.selections))
        if selecting is not None and not selecting.remembered:
            launches = select_whole(executable, selecting, leaves)
            if launches is not None:
                executable.selections = launches
                executable.run_as(select_program(program, launches))
            if store is not None:
                store.write(program, executable.selections)
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
        self._interruption: str | None = None

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
            try:
                pools[program.device] = driver.new_pool()
            except InterruptedCaptureError as error:
                self._interruption = str(error)
                return None
        is_measured = any(one.is_measured for one in self._function.passes)
        policy = self._function.options.selection if is_measured else None
        pool, made = pools[program.device], list[Executable]()
        common = self._shared.common if self.donation is None and self.reused is None else None

        def record() -> None:
            made.append(record_program(program, driver, pool, leaves, self.reused, policy, common))

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
        for index, selection in executable.selections.items():
            log.debug("%s: region %d %s", self._function.name, index, selection)
        if self.donation is not None and executable.graphs:
            executable.adopt(self.donation.leaves(program), leaves, self.donation.notes)
        if executable.recorded:
            driver.give_back()  # what trials have used, which lies on other streams and in pieces of other sizes
        return executable

    def review(self, entry: Recorded, leaves: list[Any]) -> None:
        """Run a round of a provisional selection, and follow what it decides.

        Args:
            entry: The entry of a call.
            leaves: The leaves of ``(args, kwargs)`` of the call, which are afterwards as they were.
        """
        executable, reviews = entry.graphs, entry.reviews
        assert reviews is not None
        try:
            with executable.driver.unwatched(), collection_postponed():
                changed = reviews.run(entry.calls, lambda: executable.review(leaves))
        except (torch.OutOfMemoryError, CaptureError) as error:  # no copies can be made of what a call updates
            entry.reviews = None
            executable.graphs[0].fallbacks.append(Fallback("select", f"it is not measured again: {error}"))
            return
        if changed:
            executable.run_as(select_program(executable.program, executable.selections))
            for index, selection in executable.selections.items():
                log.debug("%s: measured again: region %d %s", self._function.name, index, selection)
        if not executable.is_provisional:
            entry.reviews = None
            policy = self._function.options.selection
            store = Remembered.of(entry.recordable, executable.driver, policy)
            if store is not None:
                store.write(executable.program, executable.selections)

    def reasons(self, program: Program) -> list[Fallback]:
        """Why nothing of a Program was recorded."""
        driver = driver_for(program.device) if self._function.records else None
        refusal = None if driver is None else driver.refusal() or self._interruption
        return [*program.fallbacks, *([] if refusal is None else [Fallback("the whole program", refusal)])]
