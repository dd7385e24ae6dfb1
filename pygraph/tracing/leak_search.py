"""A search for objects of a trace that something older refers to, by way of the garbage collector."""

# Objects of any type are looked at here, and some private parts of torch.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.autograd.graph import Node

from pygraph.process.collection import objects_of, references_leading_to
from pygraph.tracing.references import Reference, is_result

# Since 3.14 the collector has one old generation, and tracks a dict from its creation on. Before, it tracks a dict when
# the first object that may be part of a cycle is put into it, so that an old dict may seem young.
_ONE_OLD_GENERATION = sys.version_info >= (3, 14)


class LeakSearch:
    """Finds references from objects that were there before a trace to objects that the trace has made.

    Args:
        made: The modes of the trace's fake tensors, and its symbols.
        young: The ids of objects that were made since it began, also by other threads. Some may have been freed.
    """

    def __init__(self, made: Iterable[weakref.ref[Any]], young: frozenset[int]) -> None:
        self._made, self._young = made, young
        self._traced: list[Any] = []
        self._found: list[Reference] = []

    def look(self, *, nodes: bool) -> list[Reference]:
        """The references that lead to tensors and symbols of the trace.

        Args:
            nodes: Whether those that lead to young nodes of autograd's graph are among them, which may hold some.
        """
        self._traced = [value for value in self._find_traced() if nodes or not isinstance(value, Node)]
        below: dict[int, set[int]] = {}  # the objects on the way that each young object refers to, by ids
        for referrer, referent in references_leading_to(self._traced, self._young):
            if id(referrer) in self._young:
                below.setdefault(id(referrer), set()).add(id(referent))
            else:
                self._found.append(Reference(referrer, referent))
        return [*self._precisely(below), *_references_of_threads({*map(id, self._traced), *below})]

    def line(self, lines: Iterable[tuple[weakref.ref[Any], str]]) -> str | None:
        """The user's line that has made one of the tensors that were found."""
        found = set(map(id, self._traced))
        return next((line for reference, line in lines if id(reference()) in found), None)

    def may_find_any(self) -> bool:
        """Whether there are tensors or symbols of the trace, or nodes of autograd, which may hold such in C++."""
        return bool(self._find_traced())

    def finds_any(self) -> bool:
        """Whether there are any tensors or symbols of the trace."""
        self._traced = self._find_traced()
        return any(not isinstance(value, Node) for value in self._traced)

    def forget(self) -> None:
        """Refer to no object that was found any more."""
        self._traced, self._found = [], []

    def _precisely(self, below: dict[int, set[int]]) -> list[Reference]:
        """The references that were found, where a dict that seems young is taken to be as old as what refers to it."""
        found: list[Reference] = []
        for reference in self._found:
            referent = reference.referent
            if type(referent) is dict and not _ONE_OLD_GENERATION and not is_result(reference):
                ids = below.get(id(referent), set())
                found += [Reference(referent, item) for item in gc.get_referents(referent) if id(item) in ids]
            else:
                found.append(reference)
        return found

    def _find_traced(self) -> list[Any]:
        """The tensors and symbols of the trace, and young nodes of autograd's graph, which may hold some in C++."""
        made = {id(value) for reference in self._made if (value := reference()) is not None}
        tests: dict[type, _IsMade] = {}

        def is_wanted(kind: type) -> bool:
            test = _test_for(kind)
            if test is not None:
                tests[kind] = test
            return test is not None

        return [
            value
            for value in objects_of(is_wanted)
            if tests[type(value)](value, made) and (id(value) in self._young or not issubclass(type(value), Node))
        ]


_IsMade: TypeAlias = "Callable[[Any, set[int]], bool]"


def _test_for(kind: type) -> _IsMade | None:
    """A test of whether an object of a class is of a trace; None if no object of that class is."""
    if issubclass(kind, FakeTensor):
        return _is_fake_of
    if issubclass(kind, torch.Tensor):
        return _wraps_fake
    if issubclass(kind, Node):
        return lambda value, made: True
    if issubclass(kind, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return lambda value, made: id(value.node) in made
    return None


def _is_fake_of(tensor: Any, made: set[int]) -> bool:
    """Whether a fake tensor is of the trace. One that another thread is about to make has no mode yet."""
    return id(getattr(tensor, "fake_mode", None)) in made


def _wraps_fake(tensor: Any, made: set[int]) -> bool:
    """Whether a tensor of functorch wraps a fake tensor of the trace."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return isinstance(tensor, FakeTensor) and _is_fake_of(tensor, made)


def _references_of_threads(young: set[int]) -> list[Reference]:
    """References from variables of functions that other threads run."""
    found: list[Reference] = []
    for thread, top in sys._current_frames().items():
        frame: types.FrameType | None = top if thread != threading.get_ident() else None
        while frame is not None:
            found += [Reference(frame, item) for item in gc.get_referents(frame) if id(item) in young]
            frame = frame.f_back
    return found
