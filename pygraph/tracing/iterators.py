"""Iterators from before a call, and calls of the system: refused as soon as a trace asks, and not moved by it.

For the time of a trace, a proxy is stored wherever such an iterator was found. It refuses calls that would move the
iterator on. Other threads that find the proxy meanwhile reach the iterator through it. Classes of torch and of the
standard library that are written in Python, as data loaders and Python's random generators, are watched themselves.
Functions of ``math`` are replaced in the same places (see `pygraph.tracing.math_functions`).
"""

# Iterators give values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode

from pygraph.errors import TraceError, with_article
from pygraph.guards.environment import Environment
from pygraph.guards.iterators import is_drawing, is_generator, is_generator_or_method, is_opaque
from pygraph.guards.system_calls import is_system_call
from pygraph.ir.source_lines import user_frame
from pygraph.tracing.explicit_generators import SEED_BEFORE, WatchedGenerator, is_watched
from pygraph.tracing.function_proxies import original_of
from pygraph.tracing.iterator_classes import watched_classes
from pygraph.tracing.iterator_locations import locations_of
from pygraph.tracing.math_functions import is_math_function, math_served, proxy_of
from pygraph.tracing.number_classes import number_classes_served
from pygraph.tracing.streams import watched_streams
from pygraph.tracing.system_calls import SystemCall, watched_outputs, watched_paths, watched_variables
from pygraph.tracing.type_function import type_served

_PASS_IT = "Pass the batch or the number as an argument."

# What moves an iterator or a file on, or tells where it is, besides what the interpreter itself calls.
_WRITING = frozenset({"write", "writelines", "flush"})
_MOVING = frozenset(
    {
        "send", "throw", "close", "asend", "athrow", "aclose", "read", "read1", "readall", "readinto", "readinto1",
        "readline", "readlines", "seek", "tell", "peek", "truncate", "iternext", "reset", "next", "line_num",
        "gi_frame", "cr_frame", "ag_frame", *_WRITING,
    }
)  # fmt: skip


class Iterators:
    """The iterators that a traced function can reach.

    Args:
        environment: What it can reach.
        numbers: Whether it is passed live numbers, with which functions of ``math`` compute.

    Attributes:
        problem: The first iterator that was asked, in words; None if none was.
        source: The user's line that asked.
        remedy: What the user can do.
        generators: The substitutes for random generators of torch's, by the generators' ids.
    """

    def __init__(self, environment: Environment, *, numbers: bool) -> None:
        self._environment, self._numbers = environment, numbers
        self._thread: int | None = None
        self._process = os.getpid()
        self._proxies: dict[int, IteratorProxy] = {}
        self.problem: str | None = None
        self.source: str | None = None
        self.remedy = _PASS_IT
        self.generators: dict[int, WatchedGenerator] = {}

    @contextlib.contextmanager
    def hidden(self) -> Generator[None, None, None]:
        """Put a proxy wherever an iterator is stored; values that the function assigns there meanwhile stay."""
        self._thread = threading.get_ident()
        with contextlib.ExitStack() as undo:  # an error while one is put back keeps no other from it
            undo.enter_context(watched_classes(self.is_asking, self.refuse))
            undo.enter_context(watched_paths(self._refuse_call))
            undo.enter_context(watched_outputs(self._refuse_call))
            undo.enter_context(watched_variables(self._refuse_call))
            undo.enter_context(watched_streams(self._refuse_call))
            undo.enter_context(type_served(self._environment))
            undo.enter_context(number_classes_served(self._environment))
            if self._numbers:
                undo.enter_context(math_served())
            try:
                for get, put, value in locations_of(self._environment):
                    instead = self.substitute(value)
                    if instead is not value and get() is value:
                        undo.callback(_put_back, get, put, instead, value)
                        put(instead)
                yield
            finally:
                self._thread = None  # from now on, a proxy that is still stored somewhere acts as the iterator
                for generator in self.generators.values():
                    generator.check = _allow

    def is_asking(self) -> bool:
        """Whether the traced function is running here, and not other code in another thread."""
        if self._process != os.getpid():
            return False  # a child, in which the thread that traces does not exist
        # A backward runs in a thread of autograd's, under the modes of the one that waits for it.
        return self._thread is not None and (threading.get_ident() == self._thread or get_proxy_mode() is not None)

    def refuse(self, iterator: object, *, writes: bool = False) -> None:
        """Note that an iterator was asked, or written to, and end the trace."""
        if self.problem is None:
            kind = with_article(type(iterator))
            does, why = (
                ("writes to", "a replay would not") if writes else ("takes from", "gives something else every time")
            )
            self.problem = f"it {does} {kind} that was there before the call, which {why}"
            self.source = user_frame(sys._getframe(1))
        raise TraceError(self.problem)

    def _refuse_call(self, what: str, remedy: str) -> None:
        """Note that the system was asked, and end the trace, if the function did it."""
        if not self.is_asking():
            return
        if self.problem is None:
            self.problem = f"{what}, which a replay would not"
            self.remedy = remedy
            self.source = user_frame(sys._getframe(2))
        raise TraceError(self.problem)

    def _refuse_seeding(self) -> None:
        """Note that a random generator was seeded or asked for its state, and end the trace, if the function did it."""
        if not self.is_asking():
            return
        if self.problem is None:
            self.problem = "it seeds a random generator, or asks for its state, which a replay would not"
            self.remedy = SEED_BEFORE
            self.source = user_frame(sys._getframe(1))
        raise TraceError(self.problem)

    def substitute(self, value: Any) -> Any:
        """The proxy for an iterator, a generator or a function, or a tuple with proxies in it; else the value."""
        if is_watched(value):
            if id(value) not in self.generators:
                self.generators[id(value)] = WatchedGenerator(value, self._refuse_seeding)
            return self.generators[id(value)]
        if is_generator_or_method(value) and not is_generator(value):
            return getattr(self.substitute(value.__self__), value.__name__)
        if is_system_call(value):
            return SystemCall(value, self._refuse_call)
        if is_math_function(value):
            return proxy_of(value) if self._numbers else value
        if is_opaque(value):
            return self._proxies.setdefault(id(value), IteratorProxy(value, self))
        if issubclass(type(value), tuple):
            items = [self.substitute(item) for item in value]
            if any(item is not before for item, before in zip(items, value, strict=True)):
                return tuple.__new__(type(value), items)
        return value


class IteratorProxy:
    """A proxy of an iterator that refuses to move it on; its ``__class__`` is that of the iterator."""

    __slots__ = ("__weakref__", "_iterator", "_iterators")

    def __init__(self, iterator: Any, iterators: Iterators) -> None:
        object.__setattr__(self, "_iterator", iterator)
        object.__setattr__(self, "_iterators", iterators)

    @property
    def __class__(self) -> Any:
        return type(_iterator_of(self))

    @__class__.setter
    def __class__(self, value: Any) -> None:
        _iterator_of(self).__class__ = value

    def __getattr__(self, name: str) -> Any:
        iterator = _iterator_of(self)
        if name in _MOVING or (is_drawing(iterator) and not name.startswith("_")):
            _check(self, writes=name in _WRITING)
        return getattr(iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_iterator_of(self), name, value)

    def __iter__(self) -> Any:
        return self if _iterators_of(self).is_asking() else iter(_iterator_of(self))

    def __aiter__(self) -> Any:
        return self if _iterators_of(self).is_asking() else aiter(_iterator_of(self))

    def __hash__(self) -> int:
        return hash(_iterator_of(self))

    def __eq__(self, other: object) -> bool:
        return other is self or _iterator_of(self) == unwrapped(other)

    def __bool__(self) -> bool:
        return bool(_iterator_of(self))

    def __repr__(self) -> str:
        return repr(_iterator_of(self))


def _moving(name: str) -> Callable[..., Any]:
    """A special method that moves an iterator on, or tells where it is."""

    def method(self: IteratorProxy, *args: Any) -> Any:
        _check(self)
        iterator = _iterator_of(self)
        return getattr(iterator, name)(*args)

    return method


for _name in (
    "__next__", "__anext__", "__await__", "__call__", "__length_hint__", "__copy__", "__deepcopy__", "__reduce_ex__",
    "__reduce__", "__contains__", "__enter__", "__exit__",
):  # fmt: skip
    setattr(IteratorProxy, _name, _moving(_name))


def unwrapped(value: object) -> Any:
    """The iterator of a proxy, or the generator of a substitute; any other value itself."""
    if type(value) is WatchedGenerator:
        return value.original
    return _iterator_of(value) if type(value) is IteratorProxy else original_of(value)


def _iterator_of(proxy: Any) -> Any:
    return object.__getattribute__(proxy, "_iterator")


def _iterators_of(proxy: Any) -> Iterators:
    return object.__getattribute__(proxy, "_iterators")


def _check(proxy: IteratorProxy, *, writes: bool = False) -> None:
    iterators = _iterators_of(proxy)
    if iterators.is_asking():
        iterator = _iterator_of(proxy)
        iterators.refuse(getattr(iterator, "__self__", iterator), writes=writes)


def _put_back(get: Callable[[], object], put: Callable[[object], object], proxy: object, value: object) -> None:
    """Store an iterator where its proxy is, unless something else has been stored there meanwhile."""
    if get() is proxy:
        put(value)


def _allow() -> None:
    """Allow whatever is asked of a generator, after the trace in which it was watched."""
