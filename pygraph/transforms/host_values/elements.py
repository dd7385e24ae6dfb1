"""Elements of host tensors: numbers that a call reads from its inputs before anything runs."""

from __future__ import annotations

from torch import fx

from pygraph.ir.descriptors import Argument, Captured
from pygraph.transforms.host_values.graph_edit import GraphEdit
from pygraph.transforms.host_values.transfers import is_host_tensor
from pygraph.transforms.rules.emitter import ITEM


def read_elements(edit: GraphEdit) -> None:
    """Make each number that is read from an input on the host an input of its own.

    Before::

        def program(x: "float32[4] cuda", k: "float64[] cpu"):
            item = aten._local_scalar_dense.default(k)
            scalar = pygraph.scalar(item, dtype=float32, device="cuda:0")

    After::

        def program(x: "float32[4] cuda", k: "float64[] cpu", element_of_k: "float"):
            scalar = pygraph.scalar(element_of_k, dtype=float32, device="cuda:0")

    Operations are functional, so that an input holds throughout what it held when the call began. The call path reads
    such a number where it reads those that are arguments, and the graph is all that runs.

    Args:
        edit: The graph that is edited.
    """
    placeholders = edit.graph.find_nodes(op="placeholder")
    described = dict(zip(placeholders, edit.inputs, strict=True))
    found: dict[fx.Node, fx.Node] = {}
    for node in edit.graph.find_nodes(op="call_function", target=ITEM):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        of = described.get(source)
        if not isinstance(of, (Argument, Captured)) or not is_host_tensor(source) or of.spec.dtype.is_complex:
            continue
        if source not in found:
            found[source] = edit.read(of, node)
        node.replace_all_uses_with(found[source])
        edit.graph.erase_node(node)
