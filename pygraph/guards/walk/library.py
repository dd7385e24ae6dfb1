"""The meaning of names in the code of torch and of other libraries, as far as a function reaches it.

A function says ``nn.Linear``, whose ``forward`` says ``F.linear``: each name is looked up at every call, and anybody
may have assigned another object to it. State is not looked for here: a library's own is no input of a trace.
"""

# Modules hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch

from pygraph.guards.packages import is_library
from pygraph.guards.storage import stored_in_cell
from pygraph.guards.walk.code_names import looked_up
from pygraph.ir.constants import IMMUTABLE

# The modules whose functions are made of operations on tensors. Others (overrides, compilers, checks of arguments) need
# only be the same functions.
_FOLLOWED = (
    "torch.nn", "torch.functional", "torch._tensor", "torch.optim", "torch.distributions", "torch.special",
    "torch.linalg", "torch.fft", "torch.signal", "torch.autograd",
)  # fmt: skip

# Where calls of modules begin, without a name in anybody's code.
_CALLED = frozenset({"forward", "__call__", "_wrapped_call_impl", "_call_impl"})

# Replaced while something is traced (see `tracing/modes.py`), perhaps by another thread.
_REPLACED_BY_TRACES = frozenset({"has_torch_function", "_is_make_fx_tracing"})


class LibraryNames:
    """The names that a library's code has for other code, followed from what a function was found to use.

    Attributes:
        entries: Dicts of modules, with a key and the value there.
        functions: The library's functions that may run.
        modules: The names of the modules that `entries` belong to, by the id of their dict.
        named: The names that its code has.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[dict[str, Any], str, Any]] = []
        self.functions: list[types.FunctionType] = []
        self.modules: dict[int, str] = {}
        self._entered: set[tuple[int, str]] = set()
        self._functions: set[int] = set()
        self._classes: dict[int, type] = {}
        self.named: set[str] = set(_CALLED)
        self._queue: list[types.FunctionType] = []

    def add_module(self, module: types.ModuleType, names: Iterable[str]) -> None:
        """Follow what names of the user's code mean in a module; numbers and texts among it are guarded too."""
        self._look_up(vars(module), names, IMMUTABLE)

    def add_names(self, variables: dict[str, Any], names: Iterable[str]) -> None:
        """Follow what names mean in the dict of a module."""
        self._look_up(variables, names)

    def add_function(self, fn: types.FunctionType) -> None:
        """Follow what a function of a library runs."""
        if id(fn) not in self._functions:
            self._functions.add(id(fn))
            self.functions.append(fn)
            if (fn.__module__ or "").startswith(_FOLLOWED):
                self._queue.append(fn)

    def add_class(self, cls: type) -> None:
        """Follow the methods that are called of a class and its bases."""
        for base in cls.__mro__:
            if (base.__module__ or "").startswith(_FOLLOWED) or base is torch.Tensor:
                self._classes[id(base)] = base

    def close(self, names: Iterable[str]) -> None:
        """Follow all names to the end, with the names in the code that uses the library."""
        self.named.update(names)
        before = None
        while self._queue or before != (len(self._functions), len(self._classes)):
            before = len(self._functions), len(self._classes)
            while self._queue:
                fn = self._queue.pop()
                found = looked_up(fn.__code__)
                self.named |= found
                self._look_up(fn.__globals__, found)
                for cell in fn.__closure__ or ():
                    self._follow(stored_in_cell(cell), found)
            for cls in [*self._classes.values()]:  # what is followed may lead to more
                for key in vars(cls).keys() & self.named:
                    self._follow(vars(cls)[key], ())

    def _look_up(self, variables: dict[str, Any], names: Iterable[str], values: tuple[type, ...] = ()) -> None:
        for key in names:
            value = variables.get(key)
            if value is None or key in _REPLACED_BY_TRACES or (id(variables), key) in self._entered:
                continue
            self._entered.add((id(variables), key))
            if not isinstance(value, (types.ModuleType, *values)) and not callable(value):
                continue
            self.modules.setdefault(id(variables), str(variables.get("__name__")))
            self.entries.append((variables, key, value))
            self._follow(value, names, values)

    def _follow(self, value: Any, names: Iterable[str], values: tuple[type, ...] = ()) -> None:
        if isinstance(value, types.ModuleType):
            if is_library(vars(value).get("__name__")):
                self._look_up(vars(value), names, values)
        elif isinstance(value, (staticmethod, classmethod)):
            self._follow(value.__func__, names)
        elif isinstance(value, types.FunctionType):
            if is_library(value.__module__):
                self.add_function(value)
                self._follow(vars(value).get("__wrapped__"), names)
        elif isinstance(value, type) and is_library(value.__module__):
            self.add_class(value)
