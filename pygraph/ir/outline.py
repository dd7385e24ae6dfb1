"""The outline of a Program: its nodes, edges and regions as plain data, of which pictures and reports are made.

It holds texts only, so that neither the Program nor the tensors that it has captured are kept alive by it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Literal

from torch import fx

from pygraph.ir.descriptors import CapturedGenerator, Input, PointerTable, Region, Stage, Stored
from pygraph.ir.effects import is_host_number, is_load, is_store, is_view, touches_device
from pygraph.ir.fields import ProgramFields
from pygraph.ir.printing import Namer, input_name, input_text, node_text, operation_name, output_text, spec_text

Kind = Literal["input", "work", "view", "host", "load", "store"]
"""Sorts of nodes: an input of the Program; work of the device; a view, which costs nothing there; arithmetic of the
host; a tensor whose address is read from a pointer slot, or stored through one."""


@dataclasses.dataclass(frozen=True)
class OutlineNode:
    """One node of a Program.

    Attributes:
        name: Its name in the Program's text.
        kind: The sort of node.
        label: The operation, or what an input or pointer slot means.
        spec: Shape, dtype and device of its value.
        text: Its line in the Program's text.
        source: The user's line.
        region: The region that it is in.
        arguments: Positions of the nodes that it takes, among those of the outline.
        kernels: The nodes that a recorded graph has for it.
        pointers: How their pointers change between replays.
        us: The microseconds of its kernels; None if they were not measured.
    """

    name: str
    kind: Kind
    label: str
    spec: str
    text: str
    source: str | None = None
    region: int | None = None
    arguments: tuple[int, ...] = ()
    kernels: tuple[str, ...] = ()
    pointers: str = ""
    us: float | None = None


@dataclasses.dataclass(frozen=True)
class OutlineOutput:
    """One output of a Program.

    Attributes:
        label: The meaning of the output.
        spec: Shape, dtype and device of its value.
        node: The position of the node that it comes from; None if that is none of the outline's.
    """

    label: str
    spec: str
    node: int | None


@dataclasses.dataclass(frozen=True)
class Outline:
    """A Program as plain data.

    Attributes:
        name: The traced function's name.
        stage: How far the Program has come.
        history: The passes that made it.
        nodes: Its nodes, inputs first, in the order in which they run.
        outputs: Its outputs.
        regions: How its nodes run.
        more: Numbers of nodes that are left out: of inputs by ``inputs``, of outputs by ``outputs``, of others by
            their region, which is None where there are no regions.
    """

    name: str
    stage: Stage
    history: tuple[str, ...]
    nodes: tuple[OutlineNode, ...]
    outputs: tuple[OutlineOutput, ...]
    regions: tuple[Region, ...]
    more: Mapping[int | str | None, int] = dataclasses.field(default_factory=dict[int | str | None, int])


Recorded = Mapping[fx.Node, tuple[tuple[str, ...], str]]
"""By node, what a recorded graph has for it: names of kernels, and how their pointers change."""


def outline(
    program: ProgramFields,
    most: int | None = None,
    recorded: Recorded | None = None,
    times: Mapping[str, float] | None = None,
) -> Outline:
    """Describe a Program by plain data.

    Args:
        program: The Program.
        most: The number of nodes that are described at most, of which each region has a share, and half as many inputs
            and outputs; None for all.
        recorded: What recorded graphs have for its nodes.
        times: Microseconds of kernels, by names of nodes in the graph.

    Example:
        >>> import torch, pygraph
        >>> found = outline(pygraph.trace(lambda x: torch.sin(x) + 1)(torch.ones(2)))
        >>> [(node.label, node.arguments) for node in found.nodes]
        [('args[0]', ()), ('sin', (0,)), ('add', (1,))]
    """
    nodes, positions, more = _Nodes(program, most, recorded or {}, times or {}).find()
    outputs = _outputs(program, positions)
    shown = outputs if most is None else outputs[: most // 2]
    if len(shown) < len(outputs):
        more["outputs"] = len(outputs) - len(shown)
    return Outline(
        program.name, program.stage, program.history, tuple(nodes), tuple(shown), program.regions, dict(more)
    )


class _Nodes:
    """The nodes of a Program, as far as an outline has them."""

    def __init__(
        self, program: ProgramFields, most: int | None, recorded: Recorded, times: Mapping[str, float]
    ) -> None:
        self._program, self._most, self._recorded, self._times = program, most, recorded, times
        self._namer = Namer()
        self._nodes: list[OutlineNode] = []
        self._positions: dict[fx.Node, int] = {}

    def find(self) -> tuple[list[OutlineNode], dict[fx.Node, int], collections.Counter[int | str | None]]:
        """The nodes, their positions, and how many others there are."""
        program = self._program
        more: collections.Counter[int | str | None] = collections.Counter()
        calls = [node for node in program.module.graph.nodes if node.op == "call_function"]
        quotas = _quotas(collections.Counter(node.meta.get("region") for node in calls), self._most)
        shown: set[fx.Node] = set()
        for node in calls:
            region = node.meta.get("region")
            if quotas[region] > 0:
                quotas[region] -= 1
                shown.add(node)
            else:
                more[region] += 1
        inputs = self._shown_inputs(shown)
        more["inputs"] = len(program.inputs) - len(inputs)
        for node, descriptor in zip(program.placeholders, program.inputs, strict=True):
            name = self._namer.give(node, input_name(descriptor))
            if node in inputs:
                self._add(node, _input(node, descriptor, name))
        for node in program.module.graph.nodes:
            if node.op == "get_attr":
                self._namer.give(node, str(node.target))
            elif node in shown:
                self._add(node, self._described(node))
            elif node.op == "call_function":
                self._namer.give(node, operation_name(node.target))
        return self._nodes, self._positions, +more

    def _shown_inputs(self, shown: set[fx.Node]) -> set[fx.Node]:
        """The inputs that are described: those that described nodes take come first."""
        inputs = self._program.placeholders
        inputs.sort(key=lambda node: shown.isdisjoint(node.users))  # the others as they are
        return set(inputs if self._most is None else inputs[: max(self._most // 2, 1)])

    def _add(self, node: fx.Node, described: OutlineNode) -> None:
        self._positions[node] = len(self._nodes)
        self._nodes.append(described)

    def _described(self, node: fx.Node) -> OutlineNode:
        text = node_text(node, self._namer)
        kind, label, spec = _kind(node), operation_name(node.target), node.meta.get("spec")
        if kind in ("load", "store") and self._program.table is not None:
            slot = self._program.table.slots[_slot(node)]
            label, spec = f"{label} {slot.of.path}", slot.spec
        sources = node.all_input_nodes if kind != "load" else ()  # all of them take the table
        table = self._program.placeholders[0] if kind == "store" else None
        arguments = [self._positions[one] for one in sources if one in self._positions and one is not table]
        kernels, pointers = self._recorded.get(node, ((), ""))
        return OutlineNode(
            self._namer.names[node], kind, label, spec_text(spec), text, node.meta.get("source"),
            node.meta.get("region"), tuple(arguments), kernels, pointers, self._times.get(node.name),
        )  # fmt: skip


def _quotas(sizes: Mapping[int | None, int], most: int | None) -> dict[int | None, int]:
    """Numbers of nodes of each region that are described, so that small regions are whole and large ones have a share.

    >>> _quotas({0: 400, 1: 3, 2: 1000}, 203)
    {1: 3, 0: 100, 2: 100}
    """
    if most is None:
        return dict(sizes)
    found: dict[int | None, int] = {}
    for count, (region, size) in enumerate(sorted(sizes.items(), key=lambda one: one[1])):
        share = (most - sum(found.values())) // (len(sizes) - count)
        found[region] = min(size, share)
    return found


def _input(node: fx.Node, descriptor: Input, name: str) -> OutlineNode:
    of_generator = isinstance(descriptor, CapturedGenerator)
    spec = "generator" if of_generator else spec_text(node.meta.get("spec"))
    text = f'{name}: "{spec}"  # {input_text(descriptor)}'
    label = "pointer table" if isinstance(descriptor, PointerTable) else input_text(descriptor)
    return OutlineNode(name, "input", label, spec, text, node.meta.get("source"))


def _kind(node: fx.Node) -> Kind:
    if is_load(node):
        return "load"
    if is_store(node):
        return "store"
    if is_view(node):
        return "view"
    return "host" if is_host_number(node) and not touches_device(node) else "work"


def _slot(node: fx.Node) -> int:
    slot = node.args[1]
    assert isinstance(slot, int)
    return slot


def _outputs(program: ProgramFields, positions: Mapping[fx.Node, int]) -> list[OutlineOutput]:
    stores = {_slot(node): node for node in program.module.graph.nodes if is_store(node)}
    found: list[OutlineOutput] = []
    for value, descriptor in zip(program.results, program.outputs, strict=True):
        node, label = value, output_text(descriptor, program)
        if isinstance(descriptor, Stored) and program.table is not None:
            node, label = stores.get(descriptor.slot), program.table.slots[descriptor.slot].of.path
            spec = spec_text(program.table.slots[descriptor.slot].spec)
        else:
            spec = spec_text(value.meta.get("spec")) if isinstance(value, fx.Node) else repr(value)
        found.append(OutlineOutput(label, spec, positions.get(node) if isinstance(node, fx.Node) else None))
    return found


def blocks(nodes: Iterable[OutlineNode]) -> list[tuple[int | str | None, list[int]]]:
    """Positions of nodes that stand together: the inputs, and the nodes of each region.

    Returns:
        In order, ``inputs`` or the region, which is None where there are no regions, with the positions.
    """
    keys = (("inputs" if node.kind == "input" else node.region, position) for position, node in enumerate(nodes))
    return [(key, [position for _, position in group]) for key, group in itertools.groupby(keys, lambda one: one[0])]
