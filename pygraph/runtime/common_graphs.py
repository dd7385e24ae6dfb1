"""Graphs that several regions have in common: the ways of a function that decides, and the turns of its loops.

Two regions that run the same operations on tensors of the same layout, and give the same of their values, are one
graph. What a replay reads and writes is patched anyway, so it does not matter whose tensors these are.
"""

# Arguments of nodes are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Sequence

import torch
from torch import fx

from pygraph.guards.donated import DonatedTensor
from pygraph.guards.torch_settings import mode_key
from pygraph.ir.argument_keys import arguments_key
from pygraph.ir.attention_states import is_unused_state
from pygraph.ir.effects import root
from pygraph.ir.leaves import overlap_groups
from pygraph.ir.selections import Mechanism, Selection, Way
from pygraph.runtime.body import RegionBody
from pygraph.runtime.capture import RegionGraph


class CommonGraphs:
    """The graphs of one function by what they compute. They live as long as some region has them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[weakref.ref[RegionGraph], Selection | None]] = {}

    def find(self, key: Hashable) -> tuple[RegionGraph | None, Selection | None]:
        """The graph that regions of this key have, if there still is one, and how it was selected."""
        found, selection = self._known.get(key, (None, None))
        graph = None if found is None else found()
        return (None if graph is None or graph.holders == 0 else graph), selection

    def keep(self, key: Hashable, graph: RegionGraph, selection: Selection | None) -> None:
        """Keep a graph for other regions of this key, and how it was selected if that is known."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = weakref.ref(graph), selection

    def clear(self) -> None:
        """Forget all graphs."""
        self._known.clear()


class CommonRegion:
    """A region, as one of those that may have a graph in common.

    Args:
        graphs: The graphs of its function; None if it has none in common.
        body: The region.
        inputs: Its inputs in a call.
        saved: Values that go to autograd alone.
        wanted: How it is to run, how its pointers are to change, and on which type of device.

    Attributes:
        selection: How it was selected when it was recorded for another Program; None if that is not known for good.
    """

    def __init__(
        self,
        graphs: CommonGraphs | None,
        body: RegionBody,
        inputs: Sequence[torch.Tensor],
        saved: Collection[fx.Node],
        wanted: tuple[Way, Mechanism, str],
    ) -> None:
        self._graphs, self._inputs, self._way = graphs, inputs, wanted[0]
        found = None if graphs is None else region_key(body, inputs, saved)
        self._key = None if found is None else (*wanted, mode_key(wanted[-1]), *found)
        self._graph, self.selection = (None, None) if graphs is None else graphs.find(self._key)

    def graph(self) -> RegionGraph | None:
        """The graph of regions like this one, held for this one as well; None if there is none that fits its inputs."""
        graph = self._graph
        if graph is None or not all(map(graph.fits, range(len(self._inputs)), self._inputs)):
            return None
        return graph.held_again()

    def keep(self, graph: RegionGraph, selection: Selection | None) -> None:
        """Keep the graph of this region, and how it was selected, for others."""
        if self._graphs is None or self._key is None:
            return
        if selection is None or selection.provisional is None:
            self._graphs.keep(self._key, graph, selection)
        elif selection.chosen.way == self._way:
            self._graphs.keep(self._key, graph, None)


_MOST_KNOWN = 1024
"""Regions that are known at the same time; more are those of a function whose traces come and go."""


def region_key(
    body: RegionBody, inputs: Sequence[torch.Tensor], saved: Collection[fx.Node]
) -> tuple[Hashable, ...] | None:
    """A key that regions have in common only if one graph can serve them.

    Args:
        body: A region.
        inputs: Its inputs in a call.
        saved: Values that go to autograd alone. Their memory stays with one graph.

    Returns:
        The key; None if the region's graph serves no other one.
    """
    if not body.nodes or any(node in saved for node in body.outputs):
        return None
    places: dict[fx.Node, Hashable] = {node: index for index, node in enumerate(body.nodes)}
    places.update((node, ("input", index)) for index, node in enumerate(body.inputs))
    places.update((node, ("number", index)) for index, node in enumerate(body.numbers))
    places.update((node, ("generator", id(value))) for node, value in body.generators.items())
    for node, value in zip(body.statics, body.static_values, strict=True):
        if isinstance(value, DonatedTensor):
            return None
        places[node] = ("captured", value.data_ptr(), _layout(value))
    arguments = [arguments_key(node, places.get) for node in body.nodes]
    if None in arguments:
        return None
    roots = [root(node) for node in body.inputs]
    return (
        tuple((node.target, found) for node, found in zip(body.nodes, arguments, strict=True)),
        tuple(_layout(tensor) for tensor in inputs),
        tuple(map(roots.index, roots)),  # views of one tensor
        tuple(map(tuple, overlap_groups(inputs))),
        tuple((places[node], is_unused_state(node)) for node in body.outputs),
        tuple(body.written),
        tuple(body.updated),
        tuple(sorted(map(id, body.versioned_statics))),
        tuple((places[node], repr(layout)) for node, layout in body.layouts.items() if node in places),
    )


def _layout(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()
