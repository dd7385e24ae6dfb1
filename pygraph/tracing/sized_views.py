"""Views whose sizes data decides, of which a trace that has asked for the sizes goes on with copies.

    part = x[i : i + n]                     # n was read from the device: asked for, it is 2
    slice = aten.slice.Tensor(x, 0, i, i + n)
    sized = pygraph.sized(slice, [2])       # a tensor of its own, of which all sizes are known

A copy is as good as the view as long as neither is updated. Where one of them is, and the other can still be read,
there is no trace that decides; the function is cut there, and a trace that knows no sizes keeps the view.
"""

# Operations are of any type. Identities of storages are private; checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError
from pygraph.guards.objects import with_parts
from pygraph.ir.functional_variants import written_values


class SizedViews:
    """The copies of one trace."""

    def __init__(self) -> None:
        self._copied: dict[int, int] = {}  # of which storage each is a copy
        self._readers: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # the tensors in each
        self._storages: list[torch.UntypedStorage] = []  # which keep their identities

    def note(self, given: Iterable[Any], views: Any, copies: Any) -> None:
        """Note the results of an operation that are views, and what a trace goes on with.

        Args:
            given: What the operation was given.
            views: Its results.
            copies: The same, with known sizes.
        """
        memory = {tensor.untyped_storage()._cdata for tensor in _tensors(given)}
        for view, copy in zip(_tensors(views), _tensors(copies), strict=True):
            source = view.untyped_storage()
            if copy is not view and source._cdata in memory:
                self._storages += (source, copy.untyped_storage())
                self._copied[copy.untyped_storage()._cdata] = source._cdata
                self._readers[copy.untyped_storage()._cdata] = [weakref.ref(copy)]

    def note_results(self, out: Any) -> None:
        """Note the results of an operation that lie in copies."""
        if not self._copied:
            return
        for tensor in _tensors(out):
            readers = self._readers.get(tensor.untyped_storage()._cdata)
            if readers is not None:
                readers.append(weakref.ref(tensor))

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse an update of a copy, or of what there are copies of.

        Raises:
            TraceError: It is one.
        """
        if not self._copied or not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
            return
        for tensor in _tensors(written_values(func, args, kwargs)):
            written = tensor.untyped_storage()._cdata
            read = (copy for copy, source in self._copied.items() if source == written and self._is_read(copy))
            if written in self._copied or any(read):
                raise TraceError(f"{func} updates a tensor with a part whose size is decided by data")

    def check_results(self, result: Any) -> None:
        """Refuse a result that is a copy of a part of another result: they would not share memory.

        Raises:
            TraceError: There is one.
        """
        if not self._copied:
            return
        leaves = pytree.tree_leaves(with_parts(result, kind=FakeTensor))
        found = {tensor.untyped_storage()._cdata for tensor in _tensors(leaves)}
        sources = [source for copy, source in self._copied.items() if copy in found]
        if len({*sources}) < len(sources) or not found.isdisjoint(sources):
            raise TraceError("it returns a tensor and a part of it whose size is decided by data")

    def _is_read(self, copy: int) -> bool:
        """Whether the trace may still read a copy."""
        return any(one() is not None for one in self._readers[copy])


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
