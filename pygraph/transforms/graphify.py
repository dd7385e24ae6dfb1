"""Cut a Program into regions: runs of nodes that are recorded as one CUDA graph, and what runs between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from pygraph.errors import StageError, describe
from pygraph.ir.attention_states import is_state_on_device
from pygraph.ir.control_flow import reason_outside
from pygraph.ir.descriptors import Captured, Fallback, Region
from pygraph.ir.effects import (
    ON_CPU,
    is_host_number,
    is_load,
    is_selection,
    is_store,
    is_view,
    is_work,
    sources,
    touches_device,
)
from pygraph.ir.order import note_order
from pygraph.ir.printing import target_text
from pygraph.ir.program import Program
from pygraph.ir.selections import Way
from pygraph.lowering.aten import lower
from pygraph.lowering.states import settle_between_regions
from pygraph.transforms.conditional_copies import copy_around_conditionals
from pygraph.transforms.schedule import Schedule, alternating_runs


def graphify_program(program: Program) -> Program:
    """Cut a Program into regions, as few as its dependencies allow.

    Nodes that can be recorded are gathered into ``graph`` regions; what cannot be (it synchronises, its shapes
    depend on data, it is on the host) runs between them and is reported with its reason and source line. Views
    cost nothing and are repeated in every region that needs them, so that regions share only memory.

    IR before::

        mul = aten.mul.Tensor(x, 2)
        item = aten._local_scalar_dense.default(mul)
        add = aten.add.Tensor(mul, item)

    IR after::

        # region 0: graph, patch
        mul = aten.mul.Tensor(x, 2)
        # region 1: eager, launch, because it needs a value on the host (train.py:7)
        item = aten._local_scalar_dense.default(mul)
        add = aten.add.Tensor(mul, item)

    Args:
        program: A Program at stage ``aten`` (lowered first), ``kernels`` or ``pointers``. With pointer slots its
            graphs are replayed on patched pointers, and without on copied inputs.

    Returns:
        A Program at stage ``regions``.

    Raises:
        StageError: The Program is cut already.
    """
    if program.stage == "regions":
        raise StageError(
            describe(f"graphify({program.name})", "stage 'regions'", expected="an uncut Program",
                     remedy="Apply graphify once.")
        )  # fmt: skip
    program = lower(program) if program.stage == "aten" else program
    way: Way = "patch" if program.table is not None else "copy"
    fallbacks = list(program.fallbacks)
    if len(program.devices) > 1:
        names = " and ".join(map(str, program.devices))
        fallbacks.append(Fallback("the whole program", f"its tensors are on {names}; a graph is of one device"))
    if program.device.type == "cpu":
        fallbacks.append(Fallback("the whole program", ON_CPU))
    module = program.copy_graph()
    graph = module.graph
    note_order(graph)
    reasons = _reasons(graph)
    schedule = alternating_runs(graph, reasons)
    _rebuild(graph, schedule)
    recordable = [index for index, (is_recorded, _) in enumerate(schedule) if is_recorded]
    copy_around_conditionals(graph, recordable, _captured(program, graph))
    if program.device.type == "cuda":
        settle_between_regions(graph, program.device)
    module.recompile()
    fallbacks += _fallbacks(schedule, reasons)
    return program.replace(
        module=module,
        stage="regions",
        regions=_regions(schedule, reasons, way),
        fallbacks=tuple(dict.fromkeys(fallbacks)),
        history=(*program.history, "graphify"),
    )


def _captured(program: Program, graph: fx.Graph) -> set[fx.Node]:
    """The placeholders of captured tensors, which stay where they are."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    pairs = zip(placeholders, program.inputs, strict=True)
    return {node for node, descriptor in pairs if isinstance(descriptor, Captured)}


def _reasons(graph: fx.Graph) -> dict[fx.Node, str]:
    """By node that cannot be recorded in a graph, the reason."""
    reasons: dict[fx.Node, str] = {}
    # A graph would always return the view that the number gave when it was recorded.
    returned = [*graph.output_node().all_input_nodes, *(node.args[2] for node in graph.nodes if is_store(node))]
    returned = {value for value in returned if is_view(value) and len(sources(value)) > 1}
    for node in graph.nodes:
        if node in returned:
            reasons[node] = "it is a view by a number that is known on the host"
        elif is_work(node):
            reason = node.meta.get("refused") or _reason(node)
            if reason is not None:
                reasons[node] = reason
    return reasons


def _reason(node: fx.Node) -> str | None:
    if is_selection(node) or is_state_on_device(node):
        return None  # it runs where its source does
    if is_host_number(node) and not touches_device(node):
        return "host arithmetic"
    return reason_outside(node)


def _regions(schedule: Schedule, reasons: Mapping[fx.Node, str], way: Way) -> tuple[Region, ...]:
    """The region of each run of a schedule; graphs are replayed in the given way."""
    regions: list[Region] = []
    for index, (recordable, nodes) in enumerate(schedule):
        first = next((node for node in nodes if node in reasons and touches_device(node)), None)
        if recordable:
            regions.append(Region(index, "graph", way))
        elif first is None:
            regions.append(Region(index, "host", "launch"))
        else:
            regions.append(Region(index, "eager", "launch", reasons[first], first.meta.get("source")))
    return tuple(regions)


def _fallbacks(schedule: Schedule, reasons: Mapping[fx.Node, str]) -> list[Fallback]:
    """A fallback for each node that touches the device and is not recorded."""
    return [
        Fallback(target_text(node.target), reasons[node], node.meta.get("source"))
        for recordable, nodes in schedule
        if not recordable
        for node in nodes
        if node in reasons and touches_device(node)
    ]


def _rebuild(graph: fx.Graph, schedule: Schedule) -> None:
    """Put the graph's nodes in the order of the schedule, with copies of the views that each region needs in it."""
    stores = [node for node in graph.nodes if is_store(node)]
    output = graph.output_node()
    home: dict[fx.Node, int] = {}
    for index, (_, nodes) in enumerate(schedule):
        home.update(dict.fromkeys(nodes, index))
    for node in graph.nodes:
        if is_load(node) or node.op == "get_attr":
            node.meta["region"] = 0
    for index, (_, nodes) in enumerate(schedule):
        views: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            output.prepend(node)
            node.meta["region"] = index
            _copy_views(graph, node, index, views)
        for node in [store for store in stores if _region(store.args[2], home, 0) == index]:
            output.prepend(node)
            node.meta["region"] = index
            _copy_views(graph, node, index, views)
    last = max(len(schedule) - 1, 0)
    for node in [store for store in stores if "region" not in store.meta]:
        output.prepend(node)
        node.meta["region"] = last
        _copy_views(graph, node, last, {})
    for value in output.all_input_nodes:
        if is_view(value) and "region" not in value.meta:
            _copy_views(graph, output, _region(value, home, last), {})
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and is_view(node) and not node.users:
            graph.erase_node(node)


def _region(value: Any, home: dict[fx.Node, int], otherwise: int) -> int:
    """The first region in which all that a value needs is known; of a view that is scheduled, its own."""
    if value in home:
        return home[value]
    return max((home[source] for source in sources(value) if source in home), default=otherwise)


def _copy_views(graph: fx.Graph, node: fx.Node, region: int, views: dict[fx.Node, fx.Node]) -> None:
    """Replace the views that ``node`` takes by copies made in its region."""

    def local(argument: fx.Node) -> fx.Node:
        if not is_view(argument) or "region" in argument.meta:
            return argument
        if argument not in views:
            source = local(argument.args[0])  # pyright: ignore[reportArgumentType]
            with graph.inserting_before(node):
                copy = graph.node_copy(argument, lambda old: source if old is argument.args[0] else old)
            copy.meta = {**argument.meta, "region": region}
            views[argument] = copy
            views[copy] = copy
        return views[argument]

    node.args = fx.node.map_arg(node.args, local)  # pyright: ignore
    node.kwargs = fx.node.map_arg(node.kwargs, local)  # pyright: ignore


def refuse(program: Program, nodes: Iterable[fx.Node], reason: str) -> Program:
    """Cut a Program again, without recording ``nodes``, which the device refused for ``reason``."""
    refused = {node.name for node in nodes}
    module = program.copy_graph()
    for old, new in zip(program.nodes, module.graph.nodes, strict=True):
        if old.name in refused:
            new.meta["refused"] = reason
        new.meta.pop("region", None)
    uncut = program.replace(
        module=module,
        stage="kernels" if program.table is None else "pointers",
        regions=(),
        history=tuple(name for name in program.history if name != "graphify"),
    )
    return graphify_program(uncut)
