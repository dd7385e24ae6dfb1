"""Gradients of what an index has picked out: added up in memory of zeros, as autograd does it in eager.

Traced, autograd adds them to a copy of the zeros, and has their positions checked, for which CUDA needs half a dozen
kernels. The index has checked them already.
"""

# torch has no public names for operator overloads. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from pygraph.ir.descriptors import TensorSpec

aten = torch.ops.aten

_ZEROS = (aten.new_zeros.default, aten.zeros_like.default)


def add_in_place(graph: fx.Graph) -> None:
    """Let such gradients be added to the zeros themselves, without another check.

    IR before::

        index = aten.index.Tensor(x, [positions])
        zeros = aten.new_zeros.default(grad, [10, 4])
        index_put = aten.index_put.default(zeros, [positions], grad, True)
        return (index, index_put)

    IR after::

        index = aten.index.Tensor(x, [positions])
        zeros = aten.new_zeros.default(grad, [10, 4])
        impl = aten._index_put_impl_.default(zeros, [positions], grad, True, True)
        return (index, zeros)

    Args:
        graph: The graph of a Program at stage ``aten``, in which a node stands for one value; it is changed.
    """
    checked: set[tuple[Any, ...]] = set()
    for node in list(graph.nodes):
        if node.target is aten.index.Tensor:
            checked.add(_positions(node))
        elif node.target is aten.index_put.default and _adds(node):
            zeros: Any = node.args[0]
            is_own = zeros.target in _ZEROS and len(zeros.users) == 1 and isinstance(zeros.meta["spec"], TensorSpec)
            if is_own and _positions(node) in checked:
                with graph.inserting_before(node):
                    call = graph.call_function(aten._index_put_impl_.default, (*node.args[:3], True, True))
                call.meta = dict(node.meta)
                node.replace_all_uses_with(zeros)
                graph.erase_node(node)


def _adds(node: fx.Node) -> bool:
    return len(node.args) == 4 and node.args[3] is True and not node.kwargs


def _positions(node: fx.Node) -> tuple[Any, ...]:
    """The positions that an operation reads or writes, and the shape of what they are positions in."""
    tensor, positions = cast("tuple[fx.Node, Sequence[fx.Node | None]]", node.args[:2])
    spec = tensor.meta["spec"]
    return (spec.shape if isinstance(spec, TensorSpec) else None, *positions)
