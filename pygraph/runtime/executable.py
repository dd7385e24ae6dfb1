"""A Program whose regions are recorded: what a call runs."""

# Only torch._C has a setter of the grad mode without the cost of a context manager. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import fx

from pygraph.errors import CaptureError
from pygraph.ir.decisions import DecisionError
from pygraph.ir.descriptors import Argument, Captured, Fallback, Region
from pygraph.ir.effects import count_kernels, root, writes_memory, written_arguments
from pygraph.ir.leaves import overlap_groups
from pygraph.ir.program import Program
from pygraph.ir.ranges import Ranges
from pygraph.ir.selections import Candidate, Mechanism, Selection
from pygraph.ir.structures import maker
from pygraph.runtime import profiler_ranges, resuming
from pygraph.runtime.adoption import Adoption, Notes
from pygraph.runtime.body import RegionBody
from pygraph.runtime.bound_region import BoundRegion
from pygraph.runtime.calling_convention import CallingConvention, Values
from pygraph.runtime.capture import RegionGraph
from pygraph.runtime.common_graphs import CommonGraphs, CommonRegion
from pygraph.runtime.copies import ChangedError, trial_leaves
from pygraph.runtime.discovery import RefusedError
from pygraph.runtime.driver import Driver, InterruptedCaptureError, Pool, RandomStates, random_states_restored
from pygraph.runtime.prior import LAUNCH
from pygraph.runtime.proof import Example, WrittenState, copy_spans
from pygraph.runtime.reuse import ReusedMemory
from pygraph.runtime.selecting import BoundCall, RegionSelector, Review, Selecting

Action = Callable[[], object]


class RefusedNodesError(CaptureError):
    """The device does not record some nodes of a Program.

    Attributes:
        program: The Program.
        nodes: Its nodes that are to run outside of graphs.
        reason: Why.
    """

    def __init__(self, program: Program, nodes: Sequence[fx.Node], reason: str) -> None:
        super().__init__(reason)
        self.program, self.nodes, self.reason = program, nodes, reason


_MEASURED_CALLS = 8
"""Calls in which the time of regions that are no graphs is measured, which costs them some tenths of a microsecond."""


class Executable:
    """A compiled Program.

    Attributes:
        program: The Program at stage ``regions``.
        convention: How a call becomes values, and these its result.
        captured: The tensors that are read where they are.
        selections: The ways in which its graph regions run, by region; `run_as` follows them.
        static_addresses: Where captured tensors were when the graphs were recorded.
        recorded: How many regions were recorded, of which some may run in another way.
        regions: Its regions as they run.
        resumptions: Where it goes on for calls that have stopped in others.
    """

    def __init__(
        self,
        program: Program,
        driver: Driver,
        pool: Pool,
        leaves: Sequence[Any],
        reused: ReusedMemory | None = None,
        selecting: Selecting | None = None,
        common: CommonGraphs | None = None,
    ) -> None:
        """Record the graphs of ``program`` with the arguments of one call as examples; they are not changed.

        Args:
            program: A Program at stage ``regions``.
            driver: The device.
            pool: Memory that the graphs share with others of the same function.
            leaves: The leaves of ``(args, kwargs)`` of a call.
            reused: Where graphs that write results to the same memory at every call say so; None for fresh results.
            selecting: How the ways of running a region are compared; None to run it as the Program says.
            common: Graphs of other Programs of the function; regions like theirs run these.

        Raises:
            RefusedNodesError: The device does not record some of the nodes.
        """
        self._reused = reused
        self._selecting = selecting
        self._common = common if len(program.regions) > 1 else None
        self.driver = driver
        self.pool = pool
        self.program, self.regions = program, list[BoundRegion]()
        self.resumptions = resuming.Resumptions()
        self.selections: dict[int, Selection] = {}
        self.recorded = 0
        self._unmeasured = _MEASURED_CALLS
        try:
            self._build(leaves)
        except (RefusedError, InterruptedCaptureError) as error:
            self.release()
            body, node = self._refusing, error.node if isinstance(error, RefusedError) else None
            nodes = body.nodes if node is None else [body.nodes[node]]
            raise RefusedNodesError(program, nodes, str(error)) from error
        except BaseException:
            self.release()
            raise
        writes = writes_memory(self.program.nodes)
        #: Whether a call updates arguments or returns views of them.
        self._shows_arguments = writes or any(alias.of in ("input", "argument") for alias in self.program.aliases)
        self.captured = [d.value for d in self.program.inputs if isinstance(d, Captured)]
        self._range = profiler_ranges.range_name(program.name)
        self._result = maker(self.program.out_tree)
        self.static_addresses = [tensor.data_ptr() for tensor in self.captured]
        self._find_unkeyed()
        if sum(bound.region.kind != "host" for bound in self.regions) > 1:  # else C++ serves the call
            for graph in self.graphs:
                graph.replay_natively()

    def _find_unkeyed(self) -> None:
        makers = {node: bound for bound in self.regions for node in bound.body.outputs}
        for bound in self.regions:
            origins = [makers.get(root(node)) for node in bound.body.inputs]
            bound.unkeyed = [i for i, maker in enumerate(origins) if maker is not None and maker.graph is None]

    # -- building -------------------------------------------------------------------------------------------------

    @property
    def _mechanism(self) -> Mechanism:
        return "auto" if self.program.table is None else self.program.table.mechanism

    def _build(self, leaves: Sequence[Any]) -> None:
        """Run the Program region by region on copies of the arguments, recording each as its inputs are known."""
        self.regions = [BoundRegion(region, RegionBody(self.program, region.index)) for region in self.program.regions]
        self.convention = self._convention()
        recorded = [bound.body for bound in self.regions if bound.region.way != "launch"]
        try:
            with self._trial(leaves, runs=self.regions[:-1]) as env:
                for bound in self.regions:
                    self._refusing = bound.body
                    if bound.region.way != "launch":
                        self._record(bound, *bound.border(env))
                    if bound is not self.regions[-1]:
                        bound.launch(env)
        except ChangedError as error:
            nodes = [node for body in recorded for node in body.nodes]  # whichever it was
            if nodes:  # else it was an operation that does not say that it writes
                raise RefusedNodesError(self.program, nodes, str(error)) from error

    def _record(self, bound: BoundRegion, inputs: list[torch.Tensor], numbers: list[Any]) -> None:
        """Record a region, and select how it runs if that is wanted."""
        body, region, selecting = bound.body, bound.region, self._selecting
        known = None if selecting is None else selecting.remembered.get(region.index)
        saved = self.convention.saved_nodes()
        wanted = region.way, self._mechanism, self.driver.device.type
        common = CommonRegion(self._common, body, inputs, saved, wanted)
        known = known or common.selection
        if known is not None:
            self.selections[region.index] = known
        default = Candidate(region.way) if known is None else known.chosen
        if default == LAUNCH:
            return
        shared = common.graph()
        if shared is not None and (known is not None or selecting is None):
            bound.graph = shared
            return
        state = WrittenState(body, inputs)
        call = BoundCall(body, self.driver, self.pool, inputs, numbers, state)
        selector = None if selecting is None or known is not None else RegionSelector(selecting, call, default)
        example = Example.of(body, self.driver, inputs, numbers, state)

        def record(one: Candidate, pool: Pool = self.pool) -> RegionGraph:
            mechanism = one.mechanism if known is None else known.mechanism
            mechanism = self._mechanism if mechanism == "auto" else mechanism
            measures = known is None
            return RegionGraph(body, self.driver, pool, example, one.way, mechanism, self._reused, saved, measures)

        begin = time.perf_counter()
        bound.graph = record(default) if shared is None else shared
        seconds = time.perf_counter() - begin
        self.recorded += shared is None
        if selector is not None and selecting is not None:
            selection = selector.select(bound.graph, seconds, record)
            if selection.chosen not in (default, LAUNCH):
                bound.graph.release()
                bound.graph = record(selection.chosen)
            selection = dataclasses.replace(selection, mechanism=bound.graph.choice.mechanism)
            self.selections[region.index] = selection
            # Later rounds would write to results of earlier calls, of which one may be an argument.
            if selection.provisional is not None and self._reused is None:
                bound.review = Review(selecting, selection)
        common.keep(bound.graph, self.selections.get(region.index))
        if bound.graph.saved is not None:
            bound.graph.saved.forget_streams()

    @contextlib.contextmanager
    def _trial(
        self, leaves: Sequence[Any], runs: Sequence[BoundRegion], donated: frozenset[int] = frozenset()
    ) -> Generator[Values, None, None]:
        """An environment for trials: arguments, captured tensors and random generators are afterwards as they were.

        Args:
            leaves: The leaves of a call.
            runs: The regions that run in it. Those that are only recorded leave nothing behind.
            donated: The leaves whose memory trials write to besides those that these regions update.
        """
        states = [WrittenState(bound.body) for bound in runs]
        generators = [one for bound in self.regions for one in bound.body.generators.values()]
        with trial_leaves(leaves, self._written_leaves(runs) | donated) as given:
            try:
                with random_states_restored(self.driver, generators), torch.no_grad():
                    yield self.convention.values(given)
            finally:
                with torch.no_grad():
                    for state in states:
                        state.put_back()

    def _written_leaves(self, regions: Sequence[BoundRegion]) -> frozenset[int]:
        """The leaves that regions write to."""
        nodes = (node for bound in regions for node in bound.body.nodes)
        written = {root(argument) for node in nodes for argument in written_arguments(node)}
        return frozenset(leaf for node, leaf in self.convention.tensors if node in written)

    def _convention(self) -> CallingConvention:
        bodies = [bound.body for bound in self.regions]
        return CallingConvention.of(self.program, (node for body in bodies for node in (*body.inputs, *body.numbers)))

    # -- calling --------------------------------------------------------------------------------------------------

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run on the leaves of ``(args, kwargs)``; they must fit the Program (see ``check_call``)."""
        grad, shown = torch.is_grad_enabled(), profiler_ranges.opened(self._range)
        torch._C._set_grad_enabled(False)  # checked with torch 2.11 and 2.13; no_grad() costs a microsecond more
        try:
            safe = leaves if self._reused is None else self._reused.moved_out(leaves, self._shows_arguments)
            env = self.convention.values(leaves if safe is None else safe)
            run = BoundRegion.run if safe is not None else BoundRegion.launch
            if self._unmeasured and safe is not None:
                self._unmeasured -= 1
                run = BoundRegion.run_measured
            stopped = resuming.here.stopped
            number = begin = 0 if stopped is None else resuming.begin_of(self, leaves, env)
            try:
                for number in range(begin, len(self.regions)):
                    run(self.regions[number], env)
            except DecisionError as error:
                if self._reused is None:
                    error.stopped = resuming.Stopped(self, number, error.index, env, leaves, stopped if begin else None)
                raise
            out = self.convention.result_leaves(env, leaves)
        finally:
            torch._C._set_grad_enabled(grad)
            profiler_ranges.close(shown)
        return self._result(out)

    @property
    def unread(self) -> frozenset[int]:
        """Leaf positions that no call looks at."""
        return frozenset(range(self.program.in_tree.num_leaves)) - self.convention.read_leaves()

    def adopt(self, donated: frozenset[int], leaves: Sequence[Any], notes: Notes) -> None:
        """Let results take over the memory of donated arguments wherever that is safe; the caller then consumes them.

        Args:
            donated: Leaf positions of arguments that every call consumes.
            leaves: The leaves of a call; they are not changed.
            notes: Where every call says what became of the memory of each.
        """
        last = self.regions[-1]
        if last.graph is None:
            return
        arguments = self._donated_arguments(donated)
        node_of = {leaf: node for node, leaf in self.convention.tensors}
        refused = {argument.leaf: self._why_not(argument, node_of.get(argument.leaf), leaves) for argument in arguments}
        usable = {node_of[argument.leaf]: argument for argument in arguments if refused[argument.leaf] is None}
        adoption = last.adoption = Adoption(last.graph, usable, notes, Ranges(self.captured))
        for argument in arguments:
            if (reason := refused[argument.leaf]) is not None:
                adoption.refuse(argument, reason)
        if adoption.pairs:
            with self._trial(leaves, self.regions, donated) as env:
                for bound in self.regions[:-1]:
                    bound.launch(env)
                if not adoption.works(env, *last.border(env)):
                    adoption.drop("a replay into its memory did not give the results of ordinary launches")

    def _donated_arguments(self, donated: frozenset[int]) -> list[Argument]:
        table = self.program.table
        inputs = [*self.program.inputs, *(slot.of for slot in (table.slots if table is not None else ()))]
        return [one for one in inputs if isinstance(one, Argument) and one.leaf in donated]

    def _why_not(self, argument: Argument, node: fx.Node | None, leaves: Sequence[Any]) -> str | None:
        """Why no result can have this argument's memory, as far as that does not depend on the call."""
        shown = {alias.index for alias in self.program.aliases if alias.of == "argument"}
        viewed = {base.leaf for _, base in self.convention.aliases if isinstance(base, Argument)}
        if argument.leaf in shown | viewed or any(root(result) is node for _, result, _ in self.convention.results):
            return "it is returned"
        if node is None:
            return "the function does not read it"
        if any(argument.leaf in group for group in overlap_groups(leaves)):
            return "it shares memory with another argument"
        if any(node is bound.body.inputs[i] for bound in self.regions for i in bound.body.written):
            return "the function updates it"
        if any(result for *_, result in self.convention.results):
            return "a copy of an argument is returned, which is made after the graphs have run"
        return None

    @contextlib.contextmanager
    def trials(self, leaves: Sequence[Any]) -> Generator[tuple[Action, Action, Action], None, None]:
        """Runs of the whole Program that leave no trace: as it was selected, by ordinary launches, and a restoration.

        Args:
            leaves: The leaves of a call. The last of the three functions puts back what the others have changed.
        """
        written = self._written_leaves(self.regions)
        generators = [one for bound in self.regions for one in bound.body.generators.values()]
        states = [WrittenState(bound.body) for bound in self.regions]
        random = RandomStates([self.driver], generators)
        with trial_leaves(leaves, written) as given, torch.no_grad():

            def run_by(each: Callable[[BoundRegion, Values], None]) -> None:
                env = self.convention.values(given)
                for bound in self.regions:
                    each(bound, env)

            def restore() -> None:
                self.pool.order()  # a timer may run on several streams
                copy_spans([leaves[i].detach() for i in written], [given[i] for i in written])
                for state in states:
                    state.put_back()
                random.restore()

            try:
                yield lambda: run_by(BoundRegion.run), lambda: run_by(BoundRegion.launch), restore
            finally:
                restore()

    # -- choosing -------------------------------------------------------------------------------------------------

    def run_as(self, program: Program) -> None:
        """Run every region in the way that this Program, cut in the same way, says from now on."""
        self.program = program
        for bound in self.regions:
            bound.region = program.regions[bound.region.index]
            if bound.region.way == "launch" and bound.graph is not None:
                bound.graph.release()
                bound.graph = None
        self._find_unkeyed()

    @property
    def is_provisional(self) -> bool:
        """Whether some regions are to be measured again."""
        return any(bound.review is not None for bound in self.regions)

    def review(self, leaves: Sequence[Any]) -> tuple[bool, float]:
        """Measure once more how regions run whose selection is provisional; arguments are afterwards as they were.

        Returns:
            Whether a selection is another one now, which `run_as` has to follow, and the microseconds of a call.
        """
        changed, microseconds = False, 0.0
        with self._trial(leaves, runs=self.regions[:-1]) as env:
            for bound in self.regions:
                review = bound.review
                if review is not None and bound.graph is not None:
                    inputs, numbers = bound.border(env)
                    state = WrittenState(bound.body, inputs)
                    call = BoundCall(bound.body, self.driver, self.pool, inputs, numbers, state)
                    if review.run_round(call, bound.graph):
                        self.selections[bound.region.index], bound.review, changed = review.selection, None, True
                    if bound.graph.saved is not None:
                        bound.graph.saved.forget_streams()
                    microseconds += review.time
                if bound is not self.regions[-1]:
                    bound.launch(env)
        return changed, microseconds

    # -- reporting ------------------------------------------------------------------------------------------------

    @property
    def graphs(self) -> list[RegionGraph]:
        """The recorded graphs, in the order in which they run."""
        return [bound.graph for bound in self.regions if bound.graph is not None]

    def reported_regions(self) -> tuple[Region, ...]:
        """The Program's regions, those that are no graphs with what the host has taken for them."""
        least = {bound.region.index: bound.least for bound in self.regions if bound.least is not None}
        return tuple(
            dataclasses.replace(one, times=(("launch", round(1e6 * least[one.index], 1)),))
            if one.index in least and one.selection is None
            else one
            for one in self.program.regions
        )

    def launched_nodes(self) -> list[fx.Node]:
        """The nodes that run outside of graphs."""
        return [node for bound in self.regions if bound.graph is None for node in bound.body.nodes]

    @property
    def fallbacks(self) -> list[Fallback]:
        """Everything that does not run in the best way, with reasons."""
        return [*self.program.fallbacks, *(f for graph in self.graphs for f in graph.fallbacks)]

    def counts(self) -> dict[str, int]:
        """Kernels, kernels in graphs, graph nodes, patched nodes, and bytes copied per replay."""
        recorded = [bound for bound in self.regions if bound.graph is not None]
        return {
            "kernels": sum(count_kernels(bound.body.nodes) for bound in self.regions),
            "kernels_in_graphs": sum(count_kernels(bound.body.nodes) for bound in recorded),
            "nodes": sum(len(graph.graph.nodes) for graph in self.graphs),
            "patched_nodes": sum(graph.patched_nodes for graph in self.graphs),
            "bytes_copied_per_replay": sum(graph.bytes_copied for graph in self.graphs),
        }

    def mechanisms(self) -> dict[str, int]:
        """How many nodes get their pointers from the host, from the device and from a table; inputs that are copied."""
        total: dict[str, int] = {"host": 0, "device": 0, "table": 0, "copy": 0}
        for graph in self.graphs:
            for name, count in graph.choice.counts().items():
                total[name] += count
        return total

    def memory_use(self) -> dict[str, int]:
        """Bytes: of the pool, which all graphs of the function share, and those of `RegionGraph.memory_use`."""
        total: dict[str, int] = {"pool": 0, "static": 0, "copied": 0, "outputs": 0}
        if self.graphs:
            total["pool"] = self.pool.nbytes()
        for graph in self.graphs:
            for name, nbytes in graph.memory_use().items():
                total[name] += nbytes
        return total

    def release(self) -> None:
        """Give all graphs back; the Executable cannot be called afterwards."""
        for bound in self.regions:
            if bound.graph is not None:
                bound.graph.release()
        self.regions = []
