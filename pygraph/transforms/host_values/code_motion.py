"""Code motion: host work and transfers leave the middle of the device's work, which then forms long runs."""

from __future__ import annotations

import torch
from torch import fx

from pygraph.ir.effects import has_effect
from pygraph.ir.random_states import states_of
from pygraph.transforms.host_values.transfers import is_download, is_upload, on_device, reads_device


def gather_device_work(graph: fx.Graph, device: torch.device) -> None:
    """Hoist host work and uploads to the front, and sink downloads and the work on them as far as their users allow.

    Device operations keep their order, and so do effects on the host. Where host and device draw from one random
    generator, as they do on the emulated device, effects on the device keep their order among them too; so they do
    where the host reads or sets the state of the device's generator.

    Args:
        graph: The graph that is edited.
        device: The accelerator that it runs on.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    one_generator = device.type != "cuda" or bool(states_of(graph, device.type))
    early = _early(nodes, one_generator)
    hoisted = [node for node in nodes if node in early]
    rest = [node for node in nodes if node not in early]
    output = graph.output_node()
    for node in hoisted + _sunk(rest, one_generator):
        output.prepend(node)


def _early(nodes: list[fx.Node], one_generator: bool) -> set[fx.Node]:
    """Host work and uploads that need nothing from the device; effects among them stay in order."""
    early: set[fx.Node] = set()
    effects_wait = False
    for node in nodes:
        host = is_upload(node) or not (on_device(node) or reads_device(node))
        ready = all(source.op == "placeholder" or source in early for source in node.all_input_nodes)
        if host and ready and not (effects_wait and has_effect(node)):
            early.add(node)
        elif has_effect(node) and (one_generator or not on_device(node)):
            effects_wait = True
    return early


def _sunk(nodes: list[fx.Node], one_generator: bool) -> list[fx.Node]:
    """Nodes in the order of the device's operations, with each of the others as late as those that need it allow."""
    late = [node for node in nodes if _sinks(node)]
    is_late = set(late)
    effects = _late_effects_before(nodes, is_late)
    order: dict[fx.Node, None] = {}
    for target in [*(node for node in nodes if node not in is_late), *late]:
        pending = [target]
        while pending:
            node = pending[-1]
            needs = [source for source in node.all_input_nodes if source in is_late and source not in order]
            if has_effect(node) and (node in is_late or one_generator):
                needs += [other for other in effects[node] if other not in order]
            if needs and node not in order:
                pending.extend(needs)
                continue
            order[pending.pop()] = None
    return list(order)


def _late_effects_before(nodes: list[fx.Node], is_late: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """By node with an effect, the earlier ones among the late nodes with an effect."""
    before: dict[fx.Node, list[fx.Node]] = {}
    late: list[fx.Node] = []
    for node in nodes:
        if has_effect(node):
            before[node] = list(late)
            if node in is_late:
                late.append(node)
    return before


def _sinks(node: fx.Node) -> bool:
    """Whether a node that cannot be hoisted is to run as late as possible: it is not the device's work."""
    return is_upload(node) or is_download(node) or not (on_device(node) or reads_device(node))
