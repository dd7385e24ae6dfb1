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

from pygraph.process.collection import objects_of, referrers_of
from pygraph.tracing.references import Reference, is_result

# The number of references that are followed: garbage that could not be collected may be a long chain.
_DISTANCE = 24

# Since 3.14 the collector has one old generation, and tracks a dict from its creation on. Before, it tracks a dict when
# the first object that may be part of a cycle is put into it, so that an old dict may seem young.
_ONE_OLD_GENERATION = sys.version_info >= (3, 14)


class LeakSearch:
    """Finds references from objects that were there before a trace to objects that the trace has made.

    Args:
        made: The modes of the trace's fake tensors, and its symbols.
        young: The ids of objects that the trace has made. Some may have been freed since.
    """

    def __init__(self, made: Iterable[weakref.ref[Any]], young: frozenset[int]) -> None:
        self._made, self._young = made, young
        self._traced: list[Any] = []
        self._layer: list[Any] = []
        self._found: list[Reference] = []

    def look(self) -> list[Reference]:
        """The references that lead to tensors and symbols of the trace."""
        self._traced = self._find_traced()
        seen = set(map(id, self._traced))
        below: dict[int, set[int]] = {}  # the objects on the way that each young object refers to, by ids
        running = _running_frames()
        layer = list(self._traced)
        for _ in range(_DISTANCE):
            self._layer = []
            ids = set(map(id, layer))
            for referrer in referrers_of(layer):
                if self._is_own(referrer) or id(referrer) in running:
                    continue
                items = {id(item): item for item in gc.get_referents(referrer) if id(item) in ids}
                if id(referrer) not in self._young:
                    self._found += [Reference(referrer, item) for item in items.values()]
                else:
                    below.setdefault(id(referrer), set()).update(items)
                    if id(referrer) not in seen:
                        seen.add(id(referrer))
                        self._layer.append(referrer)
            if not self._layer:
                break
            layer = self._layer
        return [*self._precisely(below), *_references_of_threads(seen)]

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
        self._traced, self._layer, self._found = [], [], []

    def _is_own(self, value: Any) -> bool:
        return type(value) is Reference or value is self._traced or value is self._layer or value is self._found

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
        return lambda value, made: id(value.fake_mode) in made
    if issubclass(kind, torch.Tensor):
        return _wraps_fake
    if issubclass(kind, Node):
        return lambda value, made: True
    if issubclass(kind, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return lambda value, made: id(value.node) in made
    return None


def _wraps_fake(tensor: Any, made: set[int]) -> bool:
    """Whether a tensor of functorch wraps a fake tensor of the trace."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return isinstance(tensor, FakeTensor) and id(tensor.fake_mode) in made


def _running_frames() -> set[int]:
    """The ids of this thread's frames, whose variables are no leaks."""
    found: set[int] = set()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        found.add(id(frame))
        frame = frame.f_back
    return found


def _references_of_threads(young: set[int]) -> list[Reference]:
    """References from variables of functions that other threads run."""
    found: list[Reference] = []
    for thread, top in sys._current_frames().items():
        frame: types.FrameType | None = top if thread != threading.get_ident() else None
        while frame is not None:
            found += [Reference(frame, item) for item in gc.get_referents(frame) if id(item) in young]
            frame = frame.f_back
    return found
