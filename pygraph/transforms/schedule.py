"""In which order nodes can run, so that those of a kind come together."""

from __future__ import annotations

from torch import fx

from pygraph.effects import (
    device_of,
    is_action,
    is_random,
    is_selection,
    is_view,
    root,
    sources,
    written_arguments,
)
from pygraph.transforms.indirect import is_load, is_store


def is_work(node: fx.Node) -> bool:
    """Whether a node is work of its own, on the device or on the host."""
    return node.op == "call_function" and not is_view(node) and not is_load(node) and not is_store(node)


def touches_device(node: fx.Node) -> bool:
    """Whether a node reads or makes tensors on an accelerator."""
    if is_selection(node):
        return False
    devices = [device_of(argument) for argument in node.all_input_nodes] + [device_of(node)]
    unknown = node.meta.get("spec") is None and not is_store(node)
    return unknown or any(device is not None and device.type not in ("cpu", "meta") for device in devices)


def alternating_runs(graph: fx.Graph, reasons: dict[fx.Node, str]) -> list[tuple[bool, list[fx.Node]]]:
    """Order the work nodes in alternating runs of those without a reason and the others, starting with the others."""
    work = [node for node in graph.nodes if is_work(node)]
    needs = _dependencies(graph, work)
    waiting = dict.fromkeys(work)
    done: set[fx.Node] = set()
    runs: list[tuple[bool, list[fx.Node]]] = []
    recordable = False
    while waiting:
        run: list[fx.Node] = []
        for node in list(waiting):
            if (_leader(node) not in reasons) == recordable and needs[node] <= done:
                run.append(node)
                done.add(node)
                del waiting[node]
        if run:
            runs.append((recordable, run))
        recordable = not recordable
    return runs


def _leader(node: fx.Node) -> fx.Node:
    """The node that decides where this one runs: a selection follows its source."""
    while is_selection(node):
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node


def _dependencies(graph: fx.Graph, work: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """What must have run before each work node: its data; random draws, assertions and writes in order."""
    needs: dict[fx.Node, set[fx.Node]] = {node: set() for node in work}
    last_effect: fx.Node | None = None
    readers: dict[fx.Node, list[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    for node in work:
        memory = [root(argument) for argument in node.all_input_nodes]
        needs[node].update(s for argument in node.all_input_nodes for s in sources(argument) if s in needs)
        for origin in memory:
            if origin in writer:
                needs[node].add(writer[origin])
        for written in written_arguments(node):
            origin = root(written)
            needs[node].update(reader for reader in readers.get(origin, ()) if reader is not node)
            writer[origin] = node
            readers[origin] = []
        for origin in memory:
            readers.setdefault(origin, []).append(node)
        if is_random(node) or is_action(node):
            if last_effect is not None:
                needs[node].add(last_effect)
            last_effect = node
        needs[node].discard(node)
    return needs
