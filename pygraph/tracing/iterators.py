"""Iterators that were there before a call: refused as soon as a trace asks for an item, and not moved by it.

For the time of a trace, a stand-in lies wherever such an iterator was found. It refuses what would move the iterator
on. Whoever else finds it meanwhile, in another thread, finds the iterator behind it. Classes of torch and of the
standard library that are written in Python are watched themselves: data loaders, and generators of Python's `random`.
"""

# What iterators give is of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import collections
import contextlib
import functools
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.data import dataloader  # its _BaseDataLoaderIter: checked with torch 2.13

from pygraph.errors import TraceError
from pygraph.guards.environment import Environment
from pygraph.guards.iterators import is_drawing, is_opaque
from pygraph.guards.locations import Item, Variable
from pygraph.ir.source_lines import user_frame
from pygraph.tracing.live_numbers import is_user_frame

REMEDY = "Pass the batch or the number as an argument."

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep

# What moves an iterator or a file on, or tells where it is, besides what the interpreter itself calls.
_MOVING = frozenset(
    {
        "send", "throw", "close", "asend", "athrow", "aclose", "read", "read1", "readall", "readinto", "readinto1",
        "readline", "readlines", "seek", "tell", "peek", "truncate", "iternext", "reset", "next", "line_num",
        "gi_frame", "cr_frame", "ag_frame",
    }
)  # fmt: skip

_Swap = tuple[Callable[[], object], Callable[[object], object], object]


class Iterators:
    """The iterators that a function can reach, and what it asks of them.

    Args:
        environment: What it can reach.

    Attributes:
        problem: What was asked first; None if nothing was.
        source: The user's line that asked.
        made: Generators that the function has made itself.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._thread: int | None = None
        self._process = os.getpid()
        self._stand_ins: dict[int, StandIn] = {}
        self.made: list[object] = []
        self.problem: str | None = None
        self.source: str | None = None

    @contextlib.contextmanager
    def hidden(self) -> Generator[None, None, None]:
        """Have a stand-in wherever an iterator lies; what the function puts elsewhere instead stays there."""
        self._thread = threading.get_ident()
        swapped: list[tuple[Callable[[], object], Callable[[object], object], object, object]] = []
        try:
            with _watched_classes(self):
                for get, put, value in _places_of(self._environment):
                    instead = self.instead(value)
                    if instead is not value and get() is value:
                        put(instead)
                        swapped.append((get, put, instead, value))
                yield
        finally:
            self._thread = None  # a stand-in that is somewhere still is the iterator from now on
            for get, put, instead, value in reversed(swapped):
                if get() is instead:
                    put(value)

    def is_asking(self) -> bool:
        """Whether it is the function that is running, not other code in another thread."""
        if self._process != os.getpid():
            return False  # a child, in which the thread that traces does not exist
        # A backward runs in a thread of autograd's, under the modes of the one that waits for it.
        return self._thread is not None and (threading.get_ident() == self._thread or get_proxy_mode() is not None)

    def refuse(self, kind: str) -> None:
        """Note what was asked, and end the trace."""
        if self.problem is None:
            self.problem = f"it takes from {kind} that was there before the call, which gives something else every time"
            self.source = user_frame(sys._getframe(1))
        raise TraceError(self.problem)

    def instead(self, value: Any) -> Any:
        """What lies in the place of a value meanwhile: itself, where there is no iterator in it."""
        if is_opaque(value):
            return self._stand_ins.setdefault(id(value), StandIn(value, self))
        if issubclass(type(value), tuple):
            items = [self.instead(item) for item in value]
            if any(item is not before for item, before in zip(items, value, strict=True)):
                return tuple.__new__(type(value), items)
        return value


class StandIn:
    """What lies in the place of an iterator; of the iterator's class, for code that asks."""

    __slots__ = ("__weakref__", "_iterator", "_iterators")

    def __init__(self, iterator: Any, iterators: Iterators) -> None:
        object.__setattr__(self, "_iterator", iterator)
        object.__setattr__(self, "_iterators", iterators)

    @property
    def __class__(self) -> Any:
        return type(_behind(self))

    @__class__.setter
    def __class__(self, value: Any) -> None:
        _behind(self).__class__ = value

    def __getattr__(self, name: str) -> Any:
        iterator = _behind(self)
        if name in _MOVING or (is_drawing(iterator) and not name.startswith("_")):
            _check(self)
        return getattr(iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_behind(self), name, value)

    def __iter__(self) -> Any:
        return self if _iterators_of(self).is_asking() else iter(_behind(self))

    def __aiter__(self) -> Any:
        return self if _iterators_of(self).is_asking() else aiter(_behind(self))

    def __hash__(self) -> int:
        return hash(_behind(self))

    def __eq__(self, other: object) -> bool:
        return other is self or _behind(self) == behind(other)

    def __bool__(self) -> bool:
        return bool(_behind(self))

    def __repr__(self) -> str:
        return repr(_behind(self))


def _moving(name: str) -> Callable[..., Any]:
    """A special method that moves an iterator on, or tells where it is."""

    def method(self: StandIn, *args: Any) -> Any:
        _check(self)
        iterator = _behind(self)
        return getattr(iterator, name)(*args)

    return method


for _name in (
    "__next__", "__anext__", "__await__", "__call__", "__length_hint__", "__copy__", "__deepcopy__", "__reduce_ex__",
    "__reduce__", "__contains__", "__enter__", "__exit__",
):  # fmt: skip
    setattr(StandIn, _name, _moving(_name))


def behind(value: object) -> Any:
    """What a stand-in stands for; anything else is itself."""
    return _behind(value) if type(value) is StandIn else value


def _behind(stand_in: Any) -> Any:
    return object.__getattribute__(stand_in, "_iterator")


def _iterators_of(stand_in: Any) -> Iterators:
    return object.__getattribute__(stand_in, "_iterators")


def _check(stand_in: StandIn) -> None:
    iterators = _iterators_of(stand_in)
    if iterators.is_asking():
        iterator = _behind(stand_in)
        iterators.refuse(_described(getattr(iterator, "__self__", iterator)))


def _described(iterator: object) -> str:
    kind = type(iterator).__name__
    return f"an {kind}" if kind[0].lower() in "aeiou" else f"a {kind}"


# ---- where they lie ------------------------------------------------------------------------------------------------


def _places_of(environment: Environment) -> Iterator[_Swap]:
    """How to read and replace what may be an iterator, or a tuple that has some, and what it is."""
    for container, key, value in environment.guards.items():
        if _may_be(value):
            location = Item(container, key)
            yield location.get, location.put, value
    for cell, value in environment.guards.cells:
        if _may_be(value):
            variable = Variable(cell)
            yield variable.get, variable.put, value
    for cls, name, value in environment.snapshot.class_attributes():
        if _may_be(value):
            yield (
                functools.partial(vars(cls).get, name), functools.partial(type.__setattr__, cls, name), value,
            )  # fmt: skip
    for value in environment.objects():
        yield from _inside(value)


def _may_be(value: object) -> bool:
    return is_opaque(value) or (issubclass(type(value), tuple) and any(map(_may_be, value)))  # pyright: ignore


def _inside(value: Any) -> Iterator[_Swap]:
    """The same for what an object holds elsewhere than in a dict or a list."""
    if issubclass(type(value), types.FunctionType):
        if value.__defaults__ and _may_be(value.__defaults__):
            yield lambda: value.__defaults__, functools.partial(setattr, value, "__defaults__"), value.__defaults__
    elif issubclass(type(value), functools.partial):
        if _may_be(value.args):
            yield lambda: value.args, functools.partial(_set_arguments, value), value.args
    elif issubclass(type(value), collections.deque):
        for index, item in enumerate(value):
            if _may_be(item):
                yield functools.partial(value.__getitem__, index), functools.partial(value.__setitem__, index), item
    else:
        for slot in _slots_of(type(value)):
            with contextlib.suppress(AttributeError):  # it holds nothing
                if _may_be(item := slot.__get__(value)):
                    yield functools.partial(_slot, slot, value), functools.partial(slot.__set__, value), item


def _set_arguments(partial: functools.partial[Any], args: object) -> None:
    state: Any = (partial.func, args, partial.keywords, vars(partial) or None)
    partial.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]


def _slot(slot: types.MemberDescriptorType, value: object) -> object:
    return getattr(value, slot.__name__, None)


@functools.lru_cache(maxsize=4096)
def _slots_of(cls: type) -> tuple[types.MemberDescriptorType, ...]:
    if not cls.__flags__ & (1 << 9):  # made by a class statement
        return ()
    found = (slot for base in cls.__mro__ for slot in vars(base).values())
    return tuple(slot for slot in found if isinstance(slot, types.MemberDescriptorType) and slot.__name__[:2] != "__")


# ---- classes in Python ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _watched_classes(iterators: Iterators) -> Generator[None, None, None]:
    """Refuse to iterate over data loaders, and to draw from generators of `random` other than the one of its functions.

    A data loader draws the seed of its workers from torch's generator, which would not be repeated either.
    """
    shared = random.random.__self__  # pyright: ignore[reportFunctionMemberAccess]
    loaders: Any = dataloader
    watched = [(loaders.DataLoader, "__iter__"), (loaders._BaseDataLoaderIter, "__next__")]
    watched += [(random.Random, name) for name in ("random", "getrandbits", "seed", "setstate", "getstate")]
    watched += [(random.SystemRandom, name) for name in ("random", "getrandbits")]
    undo: list[Callable[[], None]] = []
    try:
        for cls, name in watched:
            undo.append(_watch(iterators, cls, name, shared))
        yield
    finally:
        for step in reversed(undo):
            step()


def _is_algebra(frame: Any) -> bool:
    """Whether it is sympy that asks, which simplifies what a trace knows of sizes and draws numbers for it."""
    while frame is not None and frame.f_code.co_filename == random.__file__:
        frame = frame.f_back
    return frame is not None and f"{os.sep}sympy{os.sep}" in frame.f_code.co_filename


def _is_import(frame: Any) -> bool:
    """Whether it is a module that asks while it is imported in the trace, which happens once, whatever is replayed."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _watch(iterators: Iterators, cls: type, name: str, shared: object) -> Callable[[], None]:
    original: Any = getattr(cls, name)
    made = iterators.made
    own = name in vars(cls)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_code is random.Random.__init__.__code__ and args and args[0] is not None:
            made.append(self)  # by the function, with a seed: it draws the same at every call
        ours = self is shared or any(self is one for one in made)
        if (
            not ours
            and iterators.is_asking()
            and is_user_frame(frame)
            and not (_is_algebra(frame) or _is_import(frame))
        ):
            iterators.refuse(_described(self))
        return original(self, *args, **kwargs)

    setattr(cls, name, method)
    return (lambda: setattr(cls, name, original)) if own else (lambda: delattr(cls, name))
