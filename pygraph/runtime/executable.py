"""A Program whose regions are recorded: what a call runs."""

# Only torch._C has a setter of the grad mode without the cost of a context manager. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.errors import CaptureError
from pygraph.ir.descriptors import (
    Argument,
    Base,
    Captured,
    Fallback,
    Input,
    Mechanism,
    PointerTable,
    Region,
    Result,
    ScalarArgument,
    Stored,
    TensorSpec,
    Way,
)
from pygraph.ir.effects import count_kernels, is_host_number, is_load, is_store, root, writes_memory
from pygraph.ir.evaluate import alias_view, clone_strided, input_value
from pygraph.ir.leaves import overlap_groups, to_number
from pygraph.ir.program import Program
from pygraph.ir.ranges import Ranges, span_of
from pygraph.runtime.adoption import Adoption, Notes
from pygraph.runtime.alignment import ALIGNMENT, aligned_copy
from pygraph.runtime.body import RegionBody
from pygraph.runtime.capture import RegionGraph
from pygraph.runtime.discovery import RefusedError
from pygraph.runtime.driver import Driver, Pool, Run
from pygraph.runtime.proof import Example, Trial
from pygraph.runtime.reuse import ReusedMemory

Timer = Callable[[Callable[[], object]], float]


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


@dataclasses.dataclass(frozen=True)
class Timing:
    """How the ways of running a region are compared.

    Attributes:
        timer: Microseconds of one ``run()``.
        fastest: The way to run in, by the time of each and the default.
        launches: The times of ordinary launches so far, by the names of a region's nodes. They are the same when nodes
            elsewhere are refused and the Program is recorded again.
    """

    timer: Timer
    fastest: Callable[[Mapping[Way, float], Way], Way]
    launches: dict[tuple[str, ...], float] = dataclasses.field(default_factory=dict[tuple[str, ...], float])


@dataclasses.dataclass
class _Step:
    """One region as it runs: its nodes, and its graph if it is one."""

    region: Region
    body: RegionBody
    graph: RegionGraph | None
    unkeyed: list[int] = dataclasses.field(default_factory=list[int])
    """Inputs of the graph that operations outside of graphs make: their layout is in no cache key."""
    adoption: Adoption | None = None


class Executable:
    """A compiled Program.

    Attributes:
        program: The Program at stage ``regions``.
        times: The times that were taken of ways of running its graph regions, by region.
        static_addresses: Where captured tensors were when the graphs were recorded.
        recorded: How many regions were recorded, of which some may run in another way.
    """

    def __init__(
        self,
        program: Program,
        driver: Driver,
        pool: Pool,
        leaves: Sequence[Any],
        reused: ReusedMemory | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Record the graphs of ``program`` with the arguments of one call as examples; they are not changed.

        Args:
            program: A Program at stage ``regions``.
            driver: The device.
            pool: Memory that the graphs share with others of the same function.
            leaves: The leaves of ``(args, kwargs)`` of a call.
            reused: Where graphs that write results to the same memory at every call say so; None for fresh results.
            timing: How the ways of running a region are compared. With it, every graph region is timed node by node,
                with patched pointers and with copies; `run_as` then makes the choice.

        Raises:
            RefusedNodesError: The device does not record some of the nodes.
        """
        self._reused = reused
        self._timing = timing
        self.driver = driver
        self.pool = pool
        self.program, self._steps = program, list[_Step]()
        self.times: dict[int, dict[Way, float]] = {}
        try:
            self._build(leaves)
        except RefusedError as error:
            self.release()
            body = self._refusing
            nodes = body.nodes if error.node is None else [body.nodes[error.node]]
            raise RefusedNodesError(program, nodes, error.reason) from error
        except BaseException:
            self.release()
            raise
        writes = writes_memory(self.program.nodes)
        #: Whether a call updates arguments or returns views of them.
        self._shows_arguments = writes or any(alias.of in ("input", "argument") for alias in self.program.aliases)
        self._captured = [d.value for d in self.program.inputs if isinstance(d, Captured)]
        self._single = self.program.out_tree == pytree.tree_structure(0)
        self.static_addresses = [tensor.data_ptr() for tensor in self._captured]
        self._find_unkeyed()

    def _find_unkeyed(self) -> None:
        makers = {node: step for step in self._steps for node in step.body.outputs}
        for step in self._steps:
            origins = [makers.get(root(node)) for node in step.body.inputs]
            step.unkeyed = [i for i, maker in enumerate(origins) if maker is not None and maker.graph is None]

    # -- building -------------------------------------------------------------------------------------------------

    @property
    def _mechanism(self) -> Mechanism:
        return "auto" if self.program.table is None else self.program.table.mechanism

    def _build(self, leaves: Sequence[Any]) -> None:
        """Run the Program region by region on copies of the arguments, recording each as its inputs are known."""
        self._steps = [_Step(region, RegionBody(self.program, region.index), None) for region in self.program.regions]
        self._plan_call()
        with self._trial(leaves) as env:
            for step in self._steps:
                self._refusing = step.body
                if step.region.way != "launch":
                    self.times[step.region.index] = self._record(step, *_border(step.body, env))
                if step is not self._steps[-1]:
                    _launch(step, env)
        self.recorded = len(self.times)

    def _record(self, step: _Step, inputs: list[torch.Tensor], numbers: list[Any]) -> dict[Way, float]:
        """Record a region, and time the ways of running it if that is wanted.

        In the order in which it needs least memory: ordinary launches come before there is a graph.
        """
        body, way, times = step.body, step.region.way, dict[Way, float]()
        timing = self._timing
        if timing is not None:
            nodes = tuple(node.name for node in body.nodes)
            if nodes not in timing.launches:
                timing.launches[nodes] = self._timed(body, inputs, numbers, body.run)
            times["launch"] = timing.launches[nodes]
        example = Example.of(body, self.driver, inputs, numbers)

        def record(way: Way) -> RegionGraph:
            return RegionGraph(body, self.driver, self.pool, example, way, self._mechanism, self._reused)

        step.graph = graph = record(way)
        if timing is None:
            return times
        times[way] = self._timed(body, inputs, numbers, graph)
        if way == "patch":
            try:
                copying = record("copy")
            except RefusedError as error:
                graph.fallbacks.append(Fallback("copies were not tried", error.reason))
                return times
            times["copy"] = self._timed(body, inputs, numbers, copying)
            if timing.fastest(times, way) == "copy":
                step.graph, copying = copying, graph
            copying.release()
        return times

    def _timed(
        self,
        body: RegionBody,
        inputs: list[torch.Tensor],
        numbers: list[Any],
        run: Callable[[list[torch.Tensor], list[Any]], object],
    ) -> float:
        """The time of ``run``, which the timer may run as often as it likes, and which leaves no trace."""
        assert self._timing is not None
        with Trial(self.driver, body, inputs) as trial:

            def restore() -> None:
                self.pool.order()  # a timer may run on several streams
                trial.restore()

            return self._timing.timer(Run(lambda: run(trial.inputs, numbers), restore if trial.has_state else None))

    @contextlib.contextmanager
    def _trial(self, leaves: Sequence[Any]) -> Generator[dict[fx.Node, Any], None, None]:
        """An environment on copies of the arguments; captured tensors and random generators are put back after."""
        written = [step.body.static_values[i].detach() for step in self._steps for i in step.body.written_statics]
        saved = [(tensor, clone_strided(tensor)) for tensor in written]
        random = self.driver.random_state()
        host_random = torch.get_rng_state()
        try:
            with torch.no_grad():
                yield self._environment(_copies(leaves))
        finally:
            self.driver.set_random_state(random)
            torch.set_rng_state(host_random)
            with torch.no_grad():
                for tensor, contents in saved:
                    tensor.copy_(contents)

    # -- calling --------------------------------------------------------------------------------------------------

    def _plan_call(self) -> None:
        """Work out once where every value of a call comes from and where it goes."""
        program = self.program
        bodies = [step.body for step in self._steps]
        used = {node for body in bodies for node in (*body.inputs, *body.numbers)}
        self._tensors: list[tuple[fx.Node, int]] = []
        self._numbers: list[tuple[fx.Node, int]] = []
        self._others: list[tuple[fx.Node, Input]] = []
        sources: dict[fx.Node, Input] = dict(zip(program.placeholders, program.inputs, strict=True))
        slots = program.table.slots if program.table is not None else ()
        for node in program.nodes:
            if is_load(node):
                sources[node] = slots[node.args[1]].of  # pyright: ignore
        results = _returned(program)
        used |= {node for _, node, _ in results}
        for node, descriptor in sources.items():
            if node not in used:
                continue
            if isinstance(descriptor, Argument):
                self._tensors.append((node, descriptor.leaf))
            elif isinstance(descriptor, ScalarArgument):
                self._numbers.append((node, descriptor.leaf))
            elif not isinstance(descriptor, PointerTable):
                self._others.append((node, descriptor))
        self._results = [(leaf, node, foreign) for leaf, node, foreign in results if leaf >= 0]
        hidden = {index: node for index, node in enumerate(_output_nodes(program)) if node is not None}
        referred: list[Input | None] = [*program.inputs, *(slot.of for slot in slots)]  # pyright: ignore
        self._aliases = [
            (alias, referred[alias.index] if alias.of == "input" else hidden[alias.index])
            for alias in program.aliases
            if alias.of in ("input", "output")
        ]
        self._arguments = [(alias.leaf, alias.index) for alias in program.aliases if alias.of == "argument"]
        self._repeats = [(alias.leaf, alias.index) for alias in program.aliases if alias.of == "result"]
        self._statics = [(static.leaf, static.value) for static in program.statics]

    def _environment(self, leaves: Sequence[Any]) -> dict[fx.Node, Any]:
        env: dict[fx.Node, Any] = {node: leaves[leaf] for node, leaf in self._tensors}
        for node, leaf in self._numbers:
            env[node] = to_number(leaves[leaf])
        for node, descriptor in self._others:
            env[node] = input_value(descriptor, leaves)
        return env

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run on the leaves of ``(args, kwargs)``; they must fit the Program (see ``check_call``)."""
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # checked with torch 2.11 and 2.13; no_grad() costs a microsecond more
        try:
            safe = leaves if self._reused is None else self._reused.moved_out(leaves, self._shows_arguments)
            env = self._environment(leaves if safe is None else safe)
            run = _run if safe is not None else _launch
            for step in self._steps:
                run(step, env)
            out: list[Any] = [None] * self.program.out_tree.num_leaves
            for leaf, node, foreign in self._results:
                out[leaf] = clone_strided(env[node]) if foreign else env[node]
            for alias, source in self._aliases:
                base = env[source] if isinstance(source, fx.Node) else input_value(source, leaves)  # pyright: ignore
                out[alias.leaf] = alias_view(alias, base)
            for leaf, value in self._statics:
                out[leaf] = value
            for leaf, argument in self._arguments:
                out[leaf] = leaves[argument]
            for leaf, earlier in self._repeats:
                out[leaf] = out[earlier]
        finally:
            torch._C._set_grad_enabled(grad)
        return out[0] if self._single else pytree.tree_unflatten(out, self.program.out_tree)

    def is_current(self) -> bool:
        """Whether captured tensors are still where the graphs read them."""
        return [tensor.data_ptr() for tensor in self._captured] == self.static_addresses

    @property
    def unread(self) -> frozenset[int]:
        """Leaf positions that no call looks at."""
        viewed = [source for _, source in self._aliases if not isinstance(source, fx.Node)]
        descriptors = [*(descriptor for _, descriptor in self._others), *viewed]
        looked_at = {leaf for _, leaf in (*self._tensors, *self._numbers, *self._arguments)}
        looked_at |= {descriptor.leaf for descriptor in descriptors if isinstance(descriptor, Argument)}
        looked_at |= {leaf for descriptor in descriptors if isinstance(descriptor, Base) for leaf in descriptor.leaves}
        return frozenset(range(self.program.in_tree.num_leaves)) - looked_at

    def adopt(self, donated: frozenset[int], leaves: Sequence[Any], notes: Notes) -> None:
        """Let results take over the memory of donated arguments wherever that is safe; the caller then consumes them.

        Args:
            donated: Leaf positions of arguments that every call consumes.
            leaves: The leaves of a call; they are not changed.
            notes: Where every call says what became of the memory of each.
        """
        last = self._steps[-1]
        if last.graph is None:
            return
        arguments = self._donated_arguments(donated)
        node_of = {leaf: node for node, leaf in self._tensors}
        refused = {argument.leaf: self._why_not(argument, node_of.get(argument.leaf), leaves) for argument in arguments}
        usable = {node_of[argument.leaf]: argument for argument in arguments if refused[argument.leaf] is None}
        adoption = last.adoption = Adoption(last.graph, usable, notes, Ranges(self._captured))
        for argument in arguments:
            if (reason := refused[argument.leaf]) is not None:
                adoption.refuse(argument, reason)
        if adoption.pairs:
            with self._trial(leaves) as env:
                for step in self._steps[:-1]:
                    _launch(step, env)
                if not adoption.works(env, *_border(last.body, env)):
                    adoption.drop("a replay into its memory did not give the results of ordinary launches")

    def _donated_arguments(self, donated: frozenset[int]) -> list[Argument]:
        table = self.program.table
        inputs = [*self.program.inputs, *(slot.of for slot in (table.slots if table is not None else ()))]
        return [one for one in inputs if isinstance(one, Argument) and one.leaf in donated]

    def _why_not(self, argument: Argument, node: fx.Node | None, leaves: Sequence[Any]) -> str | None:
        """Why no result can have this argument's memory, as far as that does not depend on the call."""
        shown = {alias.index for alias in self.program.aliases if alias.of == "argument"}
        viewed = {base.leaf for _, base in self._aliases if isinstance(base, Argument)}
        if argument.leaf in shown | viewed or any(root(result) is node for _, result, _ in self._results):
            return "it is returned"
        if node is None:
            return "the function does not read it"
        if any(argument.leaf in group for group in overlap_groups(leaves)):
            return "it shares memory with another argument"
        if any(node is step.body.inputs[i] for step in self._steps for i in step.body.written):
            return "the function updates it"
        if any(result for *_, result in self._results):
            return "a copy of an argument is returned, which is made after the graphs have run"
        return None

    # -- choosing -------------------------------------------------------------------------------------------------

    def run_as(self, program: Program) -> None:
        """Run every region in the way that this Program, cut in the same way, says from now on."""
        self.program = program
        for step in self._steps:
            step.region = program.regions[step.region.index]
            if step.region.way == "launch" and step.graph is not None:
                step.graph.release()
                step.graph = None

    # -- reporting ------------------------------------------------------------------------------------------------

    @property
    def graphs(self) -> list[RegionGraph]:
        """The recorded graphs, in the order in which they run."""
        return [step.graph for step in self._steps if step.graph is not None]

    @property
    def fallbacks(self) -> list[Fallback]:
        """Everything that does not run in the best way, with reasons."""
        return [*self.program.fallbacks, *(f for graph in self.graphs for f in graph.fallbacks)]

    def counts(self) -> dict[str, int]:
        """Kernels, kernels in graphs, graph nodes, patched nodes, and bytes copied per replay."""
        return {
            "kernels": sum(count_kernels(step.body.nodes) for step in self._steps),
            "kernels_in_graphs": sum(count_kernels(step.body.nodes) for step in self._steps if step.graph is not None),
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
        for step in self._steps:
            if step.graph is not None:
                step.graph.release()
        self._steps = []


def _copies(leaves: Sequence[Any]) -> list[Any]:
    """The leaves with every tensor replaced by a copy of the same alignment; shared memory stays shared."""
    result = [_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    for group in overlap_groups(leaves):
        members = [leaves[index].detach() for index in group]
        start, end = span_of(members)
        size = -(-(end - start) // 16) * 16
        shift = start % ALIGNMENT  # with which every member is aligned as it was, wherever in the group it lies
        copy = torch.zeros(size + shift, dtype=torch.uint8, device=members[0].device)[shift:]
        for member in members:  # each out of its own storage: another's may end before it, or begin after
            place = member.data_ptr() - start
            memory = _bytes_of(member)
            copy[place : place + memory.numel()].copy_(memory)
        for index, member in zip(group, members, strict=True):
            typed = copy.view(member.dtype)
            first = typed.storage_offset() + (member.data_ptr() - start) // member.element_size()
            result[index] = typed.as_strided(member.shape, member.stride(), first)
    return result


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.data_ptr() - storage.data_ptr()
    return memory.set_(storage, offset, (TensorSpec.of(tensor).nbytes,), (1,))  # pyright: ignore


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # A view without elements must not keep the memory that it is a view of.
    return aligned_copy(tensor) if tensor.numel() else dataclasses.replace(TensorSpec.of(tensor), offset=0).empty()


def _output_nodes(program: Program) -> list[fx.Node | None]:
    """Per output, the node whose value it is, also where it is stored through a pointer slot."""
    stored: dict[int, fx.Node] = {
        node.args[1]: node.args[2]  # pyright: ignore
        for node in program.nodes
        if is_store(node)
    }
    return [
        stored[descriptor.slot] if isinstance(descriptor, Stored) else value if isinstance(value, fx.Node) else None
        for value, descriptor in zip(program.results, program.outputs, strict=True)
    ]


def _returned(program: Program) -> list[tuple[int, fx.Node, bool]]:
    """Results as (leaf, node, whether the node is memory of an input and must be cloned); hidden ones as leaf -1."""
    found: list[tuple[int, fx.Node, bool]] = []
    for node, descriptor in zip(_output_nodes(program), program.outputs, strict=True):
        result = program.table.slots[descriptor.slot].of if isinstance(descriptor, Stored) else descriptor  # pyright: ignore
        if node is not None and isinstance(result, Result):
            origin = root(node)
            found.append(
                (result.leaf, node, is_load(origin) or (origin.op == "placeholder" and not is_host_number(origin)))
            )
    return found


def _border(body: RegionBody, env: dict[fx.Node, Any]) -> tuple[list[torch.Tensor], list[Any]]:
    return [env[node] for node in body.inputs], [env[node] for node in body.numbers]


def _launch(step: _Step, env: dict[fx.Node, Any]) -> None:
    inputs, numbers = _border(step.body, env)
    env.update(zip(step.body.outputs, step.body.run(inputs, numbers), strict=True))


def _run(step: _Step, env: dict[fx.Node, Any]) -> None:
    if step.graph is None:
        _launch(step, env)
        return
    inputs, numbers = _border(step.body, env)
    if step.unkeyed and not all(step.graph.fits(position, inputs[position]) for position in step.unkeyed):
        note = Fallback(f"region {step.region.index}", "a value from outside of graphs is laid out in another way now")
        if note not in step.graph.fallbacks:
            step.graph.fallbacks.append(note)
        _launch(step, env)
        return
    taken = None if step.adoption is None else step.adoption.memory(env)
    env.update(zip(step.body.outputs, step.graph(inputs, numbers, taken), strict=True))
