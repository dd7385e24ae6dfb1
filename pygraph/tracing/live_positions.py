"""Views at a position that a live number says: read and written by an index that the device holds.

``cache[:, pos]`` of an ``int`` is a view whose offset is another one for each number. In a functional graph, where such
a view is only read, and written by ``select_scatter``, these are the same as operations with an index, which is a word
that each call sends:

    select = aten.select.int(cache, 1, pos)               index = pygraph.scalar(pos)
    copy = aten.copy.default(select, x)              ─▶   index_copy = aten.index_copy.default(cache, 1, index, x)
    new = aten.select_scatter.default(cache, copy, 1, pos)

That a position is inside of the tensor is one of the comparisons that calls make before.
"""

# The tracer works on torch's private parts, and on symbols, of which torch says nothing. Checked with torch 2.11, 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pygraph.tracing.positions import GRADIENTS, SCATTERS, VIEWS, position_of
from pygraph.tracing.recording_interpreter import RecordingInterpreter

aten = torch.ops.aten


def has_live_positions(graph: fx.Graph) -> bool:
    """Whether there are views at live positions in a functional graph."""
    return any(map(_is_by_index, graph.nodes))


def _is_by_index(node: fx.Node) -> bool:
    """Whether an operation has a live position, and is not a view that the host makes anew at each call."""
    if position_of(node) is None:
        return False
    is_host_view = node.target in VIEWS and node.meta["val"].device.type == "cpu"
    return not is_host_view or any(user.target is aten.copy.default for user in node.users)


class PositionsInterpreter(RecordingInterpreter):
    """Runs a functional graph again, with operations by an index for views at live positions."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        if n.target is aten.copy.default and _is_by_index(n.args[0]):  # pyright: ignore[reportArgumentType]
            return self._noted(n, self._copied)
        if _is_by_index(n):
            return self._noted(n, self._indexed)
        return super().run_node(n)

    def _noted(self, node: fx.Node, run: Callable[[fx.Node], torch.Tensor]) -> Any:
        return self.traced_for(node, lambda: run(node))

    def _copied(self, node: fx.Node) -> torch.Tensor:
        """The new contents of a view, of which the old ones are not read."""
        (view, source), _ = self.fetch_args_kwargs_from_env(node)
        source = source if source.dtype == view.dtype else source.to(view.dtype)
        return source.expand(view.shape)

    def _indexed(self, node: fx.Node) -> torch.Tensor:
        target: Any = node.target
        args, _ = self.fetch_args_kwargs_from_env(node)
        view: Any = node.meta["val"]
        if target in GRADIENTS:
            gradient, sizes, dim, start, *rest = args
            whole = gradient.new_zeros(sizes)
            return _written(target is aten.select_backward.default, whole, gradient, dim, start, rest)
        if target in SCATTERS:
            whole, source, dim, start, *rest = args
            return _written(target is aten.select_scatter.default, whole, source, dim, start, rest)
        whole, dim, start, *rest = args
        return _read(target is aten.select.int, whole, dim, start, rest, view)


def _read(is_select: bool, whole: torch.Tensor, dim: int, start: Any, rest: Sequence[Any], view: Any) -> torch.Tensor:
    """The elements of a view, in memory of their own, where their order is that of the view."""
    dim = dim % whole.dim()
    length = 1 if is_select else view.shape[dim]
    order = sorted(range(whole.dim()), key=lambda one: (-whole.stride(one), one))
    index = _index(whole, dim, start, length, rest)
    if order == list(range(whole.dim())):
        found = whole.index_select(dim, index)
    else:
        found = whole.permute(order).index_select(order.index(dim), index)
        found = found.permute([order.index(one) for one in range(whole.dim())])
    return found.squeeze(dim) if is_select else found


def _written(
    is_select: bool, whole: torch.Tensor, source: torch.Tensor, dim: int, start: Any, rest: Sequence[Any]
) -> torch.Tensor:
    """A tensor with other contents of a view of it."""
    dim = dim % whole.dim()
    source = source.unsqueeze(dim) if is_select else source
    return aten.index_copy.default(whole, dim, _index(whole, dim, start, source.shape[dim], rest), source)


def _index(whole: torch.Tensor, dim: int, start: Any, length: int, rest: Sequence[Any]) -> torch.Tensor:
    """The positions of a view of some length; ``rest`` is where it ends and its step."""
    if start.node.hint < 0:  # of which the trace is of one sign
        start = start + whole.shape[dim]
    first = torch.ops.pygraph.scalar(start, dtype=torch.int64, device=whole.device).view(1)
    if length == 1:
        return first
    step = rest[1] if len(rest) > 1 else 1
    return first + torch.arange(0, length * step, step, dtype=torch.int64, device=whole.device)
