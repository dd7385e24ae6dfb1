"""A Program whose regions are recorded: what a call runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from pygraph.effects import root
from pygraph.evaluate import assemble, bind_arguments, clone_strided
from pygraph.program import Captured, Fallback, Program, Region, Stored, TensorSpec, Way
from pygraph.runtime.body import ALIGNMENT, RegionBody, alignment, stand_in
from pygraph.runtime.capture import RefusedError, RegionGraph
from pygraph.runtime.driver import Driver, Pool
from pygraph.trace import overlap_groups
from pygraph.transforms.graphify import kernels, refuse, with_ways
from pygraph.transforms.indirect import is_load


@dataclasses.dataclass
class _Step:
    """One region as it runs: its nodes, and its graph if it is one."""

    region: Region
    body: RegionBody
    graph: RegionGraph | None


class Executable:
    """A compiled Program.

    Attributes:
        program: The Program at stage ``regions``, as it was finally cut.
        static_addresses: Where captured tensors were when the graphs were recorded.
    """

    def __init__(self, program: Program, driver: Driver, pool: Pool, leaves: Sequence[Any]) -> None:
        """Record the graphs of ``program`` with the arguments of one call as examples; they are not changed.

        Args:
            program: A Program at stage ``regions``.
            driver: The device.
            pool: Memory that the graphs share with others of the same function.
            leaves: The leaves of ``(args, kwargs)`` of a call.
        """
        self.driver = driver
        self.pool = pool
        self._released = False
        while True:
            try:
                self.program, self._steps = program, []
                self._build(leaves)
                break
            except RefusedError as error:
                self.release()
                self._released = False
                step = self._refusing
                nodes = step.nodes if error.node is None else [step.nodes[error.node]]
                program = refuse(self.program, nodes, error.reason)
            except BaseException:
                self.release()
                raise
        self._stored = self._stored_values()
        self._captured = [d.value for d in self.program.inputs if isinstance(d, Captured)]
        self.static_addresses = [tensor.data_ptr() for tensor in self._captured]

    # -- building -------------------------------------------------------------------------------------------------

    def _build(self, leaves: Sequence[Any]) -> None:
        """Run the Program region by region on copies of the arguments, recording each as its inputs are known."""
        with self._trial(leaves) as env:
            for region in self.program.regions:
                body = RegionBody(self.program, region.index)
                self._refusing = body
                graph = None
                if region.way != "launch":
                    inputs, numbers = _border(body, env)
                    graph = RegionGraph(body, self.driver, self.pool, inputs, numbers, region.way)
                self._steps.append(_Step(region, body, graph))
                _launch(self._steps[-1], env)

    @contextlib.contextmanager
    def _trial(self, leaves: Sequence[Any]) -> Iterator[dict[fx.Node, Any]]:
        """An environment on copies of the arguments; captured tensors and random generators are put back after."""
        captured = [d.value.detach() for d in self.program.inputs if isinstance(d, Captured)]
        used = {i for region in self.program.regions for i in self._written_statics(region.index)}
        saved = [(captured[i], clone_strided(captured[i])) for i in sorted(used)]
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

    def _written_statics(self, region: int) -> list[int]:
        body = RegionBody(self.program, region)
        captured = [
            node
            for node, descriptor in zip(self.program.placeholders, self.program.inputs, strict=True)
            if isinstance(descriptor, Captured)
        ]
        return [captured.index(body.statics[i]) for i in body.written_statics]

    def _environment(self, leaves: Sequence[Any]) -> dict[fx.Node, Any]:
        values, slots = bind_arguments(self.program, leaves)
        env: dict[fx.Node, Any] = dict(zip(self.program.placeholders, values, strict=True))
        for node in self.program.nodes:
            if is_load(node):
                env[node] = slots[node.args[1]]  # pyright: ignore
        self._slots = slots
        return env

    def _stored_values(self) -> dict[int, tuple[fx.Node, bool]]:
        """Per result slot, the node that is stored, and whether it is memory of an input and must be cloned."""
        stored: dict[int, tuple[fx.Node, bool]] = {}
        for node in self.program.nodes:
            if node.target is torch.ops.pygraph.store.default:
                value: fx.Node = node.args[2]  # pyright: ignore[reportAssignmentType]
                origin = root(value)
                stored[node.args[1]] = (value, is_load(origin) or origin.op == "placeholder")  # pyright: ignore
        return stored

    # -- calling --------------------------------------------------------------------------------------------------

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run on the leaves of ``(args, kwargs)``; they must fit the Program (see ``check_call``)."""
        with torch.no_grad():
            env = self._environment(leaves)
            slots = self._slots
            for step in self._steps:
                _run(step, env)
            outputs: list[Any] = []
            for value, descriptor in zip(self.program.results, self.program.outputs, strict=True):
                if isinstance(descriptor, Stored):
                    node, foreign = self._stored[descriptor.slot]
                    outputs.append(clone_strided(env[node]) if foreign else env[node])
                else:
                    outputs.append(env[value] if isinstance(value, fx.Node) else value)
            inputs = [env[node] for node in self.program.placeholders] + slots
            return assemble(self.program, inputs, outputs)

    def is_current(self) -> bool:
        """Whether captured tensors are still where the graphs read them."""
        return all(
            tensor.data_ptr() == address for tensor, address in zip(self._captured, self.static_addresses, strict=True)
        )

    # -- choosing -------------------------------------------------------------------------------------------------

    def measure(self, leaves: Sequence[Any], time: Callable[[Callable[[], object]], float] | None = None) -> Program:
        """Time every graph region node by node, with patched pointers and with copies, and keep the fastest.

        Args:
            leaves: The leaves of a call; they are not changed.
            time: Microseconds of one ``run()``; the driver's own measurement by default.

        Returns:
            The Program with the chosen ways and the times; this Executable runs it from now on.
        """
        time = time or self.driver.measure
        chosen: dict[int, tuple[Way, tuple[tuple[str, float], ...]]] = {}
        with self._trial(leaves) as env:
            for step in self._steps:
                if step.graph is not None:
                    chosen[step.region.index] = self._fastest(step, env, time)
                _launch(step, env)
        self._switch(chosen)
        return self.program

    def _fastest(
        self, step: _Step, env: dict[fx.Node, Any], time: Callable[[Callable[[], object]], float]
    ) -> tuple[Way, tuple[tuple[str, float], ...]]:
        body, graph = step.body, step.graph
        assert graph is not None
        inputs, numbers = _border(body, env)
        times: dict[Way, float] = {"launch": time(lambda: body.run(inputs, numbers))}
        times[step.region.way] = time(lambda: graph(inputs, numbers))
        if step.region.way == "patch":
            copying = RegionGraph(body, self.driver, self.pool, inputs, numbers, "copy")
            times["copy"] = time(lambda: copying(inputs, numbers))
            if times["copy"] < min(times["launch"], times["patch"]):
                step.graph = copying
                graph.release()
            else:
                copying.release()
        best = min(times, key=lambda way: times[way])
        return best, tuple((way, round(value, 3)) for way, value in times.items())

    def _switch(self, chosen: dict[int, tuple[Way, tuple[tuple[str, float], ...]]]) -> None:
        self.program = with_ways(self.program, chosen)
        for step in self._steps:
            step.region = self.program.regions[step.region.index]
            if step.region.way == "launch" and step.graph is not None:
                step.graph.release()
                step.graph = None
        self.program = self.program.replace(history=(*self.program.history, "select"))

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
            "kernels": sum(kernels(step.body.nodes) for step in self._steps),
            "kernels_in_graphs": sum(kernels(step.body.nodes) for step in self._steps if step.graph is not None),
            "nodes": sum(len(graph.graph.nodes) for graph in self.graphs),
            "patched_nodes": sum(graph.patcher.patched_nodes for graph in self.graphs),
            "bytes_copied_per_replay": sum(graph.bytes_copied for graph in self.graphs),
        }

    def release(self) -> None:
        """Give all graphs back; the Executable cannot be called afterwards."""
        for step in self._steps:
            if step.graph is not None:
                step.graph.release()
        self._steps = []


def _copies(leaves: Sequence[Any]) -> list[Any]:
    """The leaves with every tensor replaced by a copy of the same alignment; shared memory stays shared."""
    result = [stand_in(leaf) if isinstance(leaf, torch.Tensor) and leaf.numel() else leaf for leaf in leaves]
    for group in overlap_groups(leaves):
        members = [leaves[index].detach() for index in group]
        start = min(member.data_ptr() for member in members)
        end = max(member.data_ptr() + TensorSpec.of(member).nbytes for member in members)
        offset = start - members[0].untyped_storage().data_ptr()
        size = -(-(end - start) // 16) * 16
        memory = torch.empty(0, dtype=torch.uint8, device=members[0].device)
        memory.set_(members[0].untyped_storage(), offset, (end - start,), (1,))  # pyright: ignore
        shift = alignment(start) % ALIGNMENT
        copy = torch.empty(size + shift, dtype=torch.uint8, device=memory.device)[shift:]
        copy[: end - start].copy_(memory)
        for index, member in zip(group, members, strict=True):
            typed = copy.view(member.dtype)
            first = typed.storage_offset() + (member.data_ptr() - start) // member.element_size()
            result[index] = typed.as_strided(member.shape, member.stride(), first)
    return result


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
    env.update(zip(step.body.outputs, step.graph(inputs, numbers), strict=True))
