"""Guards on the code that a trace ran: classes, functions, and of which class objects are.

A class is compared by its version, which the interpreter changes with the class and its bases. Where that is another
one, what the classes hold is compared by itself: a trace elsewhere patches `nn.Module` for a while, and libraries keep
caches in their classes.
"""

# Classes hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import functools
import operator
import os
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from pygraph.guards.packages import is_library_class

_MISSING: Any = object()

# Attributes of classes that do not change what their objects do; copyreg and abc store some when they are used.
_SILENT = frozenset(
    {
        "__doc__", "__module__", "__qualname__", "__name__", "__dict__", "__weakref__", "__slotnames__",
        "__abstractmethods__", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",
        "__firstlineno__", "__static_attributes__", "_abc_impl",
    }
)  # fmt: skip

# Functions of these files are patched in for the time of a trace, which may be one of another thread.
_TRACERS = (
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "tracing", ""),
    os.path.join(os.path.dirname(torch.__file__), "fx", "_symbolic_trace.py"),
    os.path.join(os.path.dirname(torch.__file__), "fx", "experimental", ""),
)

# Flags of types: made by a class statement, and not to be changed. Unchanged from CPython 3.11 to 3.14.
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8


class _Class:
    """A class as it is now, shared by all guards on it."""

    __slots__ = ("__weakref__", "cls", "mro", "values")

    def __init__(self, cls: type) -> None:
        self.cls, self.mro, self.values = cls, cls.__mro__, dict(vars(cls))

    def is_exact(self) -> bool:
        """Whether the class has the very same attributes and bases."""
        now = vars(self.cls)
        same = len(now) == len(self.values) and all(map(operator.is_, now.values(), self.values.values()))
        return same and self.cls.__mro__ is self.mro and list(now) == list(self.values)


_known: weakref.WeakValueDictionary[int, _Class] = weakref.WeakValueDictionary()


def _class_now(cls: type) -> _Class:
    found = _known.get(id(cls))
    if found is None or not found.is_exact():
        found = _known[id(cls)] = _Class(cls)
    return found


class CodeGuards:
    """Classes, functions and objects whose code is what it was.

    Attributes:
        functions: Functions with their code, defaults, and defaults of keywords.
        kinds: Objects and their classes.
        partials: Partial functions and what they apply.
    """

    def __init__(self) -> None:
        self.functions: list[tuple[types.FunctionType, types.CodeType, Any, Any]] = []
        self.kinds: list[tuple[object, type]] = []
        self.partials: list[tuple[functools.partial[Any], tuple[Any, ...]]] = []
        self._classes: dict[int, _Class] = {}
        self._names: dict[int, str] = {}
        self._lists: _Lists | None = None

    # -- what is guarded ----------------------------------------------------------------------------------------------

    def add_function(self, fn: types.FunctionType) -> None:
        """Guard what a function does when it is called."""
        # The values of defaults that are there are guarded where they are found; there, another tuple is another one.
        self.functions.append((fn, fn.__code__, fn.__defaults__, fn.__kwdefaults__))

    def add_object(self, name: str, value: object) -> None:
        """Guard of which class an object is, and that class."""
        cls = type(value)
        if cls.__flags__ & _HEAP_TYPE and not cls.__flags__ & _IMMUTABLE_TYPE:
            self.kinds.append((value, cls))
            self._names[id(value)] = name
        self.add_class(cls)

    def add_class(self, cls: type) -> None:
        """Guard a class with its bases and their metaclasses."""
        for base in cls.__mro__:
            if id(base) not in self._classes and not base.__flags__ & _IMMUTABLE_TYPE:
                self._classes[id(base)] = _class_now(base)
                self.add_class(type(base))

    def add_partial(self, partial: functools.partial[Any]) -> None:
        """Guard what a partial function applies, which its ``__setstate__`` may change."""
        self.partials.append((partial, (partial.func, partial.args, partial.keywords)))

    def release(self, released: set[int]) -> None:
        """Guard objects of these ids no longer, nor hold them."""
        self.kinds = [entry for entry in self.kinds if id(entry[0]) not in released]
        self._lists = None

    def clear(self) -> None:
        """Guard nothing any more."""
        self.functions, self.kinds, self.partials, self._classes = [], [], [], {}
        self._lists = None

    @property
    def types(self) -> list[type]:
        """The classes whose versions stand for those of all."""
        below = {id(base) for known in self._classes.values() for base in known.mro[1:]}
        return [known.cls for known in self._classes.values() if id(known.cls) not in below]

    def description(self) -> tuple[Any, ...]:
        """All guards, as `native/guards.h` reads them."""
        return tuple(self.types), tuple(self.functions), tuple(self.kinds), tuple(self.partials), self.classes_hold

    # -- whether it is as it was --------------------------------------------------------------------------------------

    def functions_hold(self) -> bool:
        """Whether functions, objects and partial functions are as they were."""
        lists = self._lists = self._lists or _Lists(self)
        return (
            [fn.__code__ for fn in lists.functions] == lists.codes
            and [type(value) for value in lists.objects] == lists.kinds
            and all(map(operator.is_, [fn.__defaults__ for fn in lists.with_defaults], lists.defaults))
            and all(map(operator.is_, [fn.__kwdefaults__ for fn in lists.with_keywords], lists.keywords))
            and (not self.partials or self._changed_function() is None)
        )

    def classes_hold(self) -> bool:
        """Whether classes are as they were, whatever their versions."""
        return self._changed_class() is None

    def changed(self) -> str | None:
        """The name of the first thing that is not as it was, as a user would write it; None if all is."""
        return self._changed_function() or self._changed_class()

    def _changed_function(self) -> str | None:
        for fn, code, defaults, keywords in self.functions:
            if fn.__code__ is not code:
                return f"the code of {fn.__qualname__}"
            if fn.__defaults__ is not defaults or fn.__kwdefaults__ is not keywords:
                return f"a default of {fn.__qualname__}"
        for value, cls in self.kinds:
            if type(value) is not cls:
                return f"the class of {self._names.get(id(value)) or 'an object'}"
        for partial, before in self.partials:
            if not _all_same((partial.func, partial.args, partial.keywords), before):
                return "what a functools.partial applies"
        return None

    def _changed_class(self) -> str | None:
        for known in self._classes.values():
            if known.is_exact():
                continue
            cls, before, now = known.cls, known.values, vars(known.cls)
            if not _all_same(cls.__mro__, known.mro):
                return f"the bases of {cls.__qualname__}"
            library = is_library_class(cls)
            for key in (*before, *(now.keys() - before.keys())):
                if self._matters(cls, key, before.get(key, _MISSING), now.get(key, _MISSING), library):
                    return f"{cls.__qualname__}.{key}"
        return None

    @staticmethod
    def _matters(owner: type, key: str, before: Any, now: Any, library: bool) -> bool:
        if before is now or key in _SILENT or is_instrument(now):
            return False
        if before is _MISSING and (library or key.startswith("__")):
            # It hides what a base has, or is code that the interpreter looks for.
            hides = any(key in vars(base) for base in owner.__mro__[1:])
            return _is_code(now) and (hides or key.startswith("__"))
        if _is_code(before) or _is_code(now):
            return True
        return before is _MISSING  # other values are guarded one by one, or are a library's own


class _Lists:
    """Functions and objects in columns, which are compared faster than one by one.

    A function without defaults that is given some does what it did wherever it was called without an error.
    """

    def __init__(self, guards: CodeGuards) -> None:
        self.functions = [fn for fn, *_ in guards.functions]
        self.codes = [code for _, code, *_ in guards.functions]
        self.with_defaults = [fn for fn, _, defaults, _ in guards.functions if defaults is not None]
        self.defaults = [defaults for *_, defaults, _ in guards.functions if defaults is not None]
        self.with_keywords = [fn for fn, *_, keywords in guards.functions if keywords is not None]
        self.keywords = [keywords for *_, keywords in guards.functions if keywords is not None]
        self.objects = [value for value, _ in guards.kinds]
        self.kinds = [kind for _, kind in guards.kinds]


def _all_same(these: Iterable[Any], those: Iterable[Any]) -> bool:
    these, those = tuple(these), tuple(those)
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _is_code(value: Any) -> bool:
    return value is not _MISSING and (callable(value) or hasattr(type(value), "__get__"))


def is_instrument(value: Any) -> bool:
    """Whether a function was patched in by a tracer, which removes it again."""
    return isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(_TRACERS)
