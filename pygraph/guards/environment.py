"""What a function can reach besides its arguments: closures, globals, modules, and the objects behind them.

A trace bakes in what it read there, so the same walk serves three ends: *guards* tell whether anything has changed
since the trace; a *snapshot* puts back what tracing changed (a traced tensor must never be left in a module); and
*names* say where a closed-over tensor was found.
"""

# Objects of any type are walked here, and isinstance leaves their items unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import abc
import argparse
import collections
import contextvars
import enum
import functools
import gc
import heapq
import itertools
import os
import pathlib
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import sharedctypes
from typing import Any

import numpy as np
import torch
from torch._C._functorch import is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13
from torch.nn.utils.parametrize import ParametrizationList

from pygraph.errors import TraceError, describe
from pygraph.guards import memos
from pygraph.guards import names as naming
from pygraph.guards.attributes import AttributeDicts
from pygraph.guards.code import CodeGuards
from pygraph.guards.contents import (
    MAX_BYTES_IN_ALL,
    AttributesBehind,
    Contents,
    contents_in_thread,
    contents_of,
    factory_of,
    gradients_of,
    has_value,
    is_plain,
    is_value,
    is_weak,
    items_in_thread,
    length_of,
    life_of,
    referent_of,
    same,
    slots_of,
    variable_of,
)
from pygraph.guards.contents import attributes_of as _attributes
from pygraph.guards.dicts import DictGuard
from pygraph.guards.donated import DonatedTensor
from pygraph.guards.library import LibraryNames
from pygraph.guards.locations import Item, Location, Variable
from pygraph.guards.registrations import Registrations
from pygraph.guards.settings import NAMES as SETTINGS
from pygraph.guards.settings import PARAMETRIZED, settings_named
from pygraph.guards.storage import is_derived, store, stored_copy, stored_item, stored_items, stored_length
from pygraph.guards.versions import Versions
from pygraph.ir.constants import IMMUTABLE

# Packages whose functions and objects are not user state.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "torch", "numpy", "triton", "pygraph", "functools",
    "pytest", "_pytest", "pluggy", "hypothesis",  # which put themselves into the globals of tests
}  # fmt: skip

# Objects of a library whose attributes change while a function uses them.
_STATEFUL = (
    torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler,
    torch.distributions.Distribution, types.SimpleNamespace, argparse.Namespace,
    collections.UserDict, collections.UserList, collections.ChainMap, queue.Queue, BaseException,
    functools.partialmethod, functools.singledispatchmethod, sharedctypes.SynchronizedBase,
)  # fmt: skip

# Of dicts, which Python's collector knows.
_VIEWS = (
    types.MappingProxyType,
    *(type(view) for one in ({}, collections.OrderedDict()) for view in (one.keys(), one.values(), one.items())),
)

# Where packages are installed: what their modules and classes hold (caches, registries) is not the function's doing.
_INSTALLED = ("site-packages", "dist-packages")

# A container with more entries than this (a vocabulary) is guarded by identity and length only.
_LARGE = 2000

# All objects are followed this deep, and deeper ones as long as these are no more; functions in functions this deep.
_DEEP, _MANY_DEEPER, _DEEP_FUNCTIONS = 6, 20_000, 4

# Attributes that every nn.Module has: hooks that run in a call, and tables that a call does not look at.
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_MACHINERY = frozenset(torch.nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"} - _HOOKS

_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                 "_global_backward_pre_hooks")  # fmt: skip

_RECORD = "_per_optimizer_states"  # of GradScaler; checked with torch 2.11 and 2.13

_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)

# Of modules and custom Functions: no code of the user's has names for them.
_CALLED_BY_TORCH = ("forward", "backward", "setup_context", "vjp", "jvp", "vmap")
# What is code or its machinery in a class, not state.
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType)

# What code calls that which a process is given by its shell.
_ENVIRONMENT_VARIABLES = frozenset({"environ", "environb", "getenv"})

_MISSING: Any = object()


class Environment:
    """The mutable state reachable from a callable, as it is now.

    Args:
        fn: A function, method, partial, or callable object (an ``nn.Module``).
        roots: Further objects to include, by name.
        gradients: Tensors whose ``.grad`` the callable reads; a gradient that nobody reads is not guarded.
    """

    def __init__(self, fn: Any, roots: dict[str, Any] | None = None, gradients: Sequence[torch.Tensor] = ()) -> None:
        self.names: dict[int, str] = {}
        self.kinds: dict[int, str] = {}
        self.tensors: list[torch.Tensor] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        # The attributes of gradient scalers, with their records of a step, which are empty between steps.
        self._records: list[tuple[dict[str, Any], Any]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        self._lengths: list[tuple[Any, int]] = []
        self._entries: list[tuple[Any, Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._contents: list[tuple[str, Contents]] = []
        # Variables of modules and attributes of classes: (name, dict or class, key, value).
        self._locations: list[tuple[str, Any, str, Any]] = []
        self._placed: set[tuple[int, str]] = set()
        self._classes: list[tuple[str, type, frozenset[str]]] = []
        # Of which the part counts that code has names for: (name, module, class or attributes of an object, depth).
        self._spaces: list[tuple[str, Any, int]] = []
        self._code_names: set[str] = set(_CALLED_BY_TORCH)
        # The ids of classes that code may call, and classes with a method that may call what it is called on.
        self._made: set[int] = set()
        self._factories: set[type] = set()
        self._abstract: list[abc.ABCMeta] = []
        self._imports: set[tuple[int, int]] = set()
        self._named_before: set[tuple[int, str]] = set()
        self._queue: list[tuple[int, int, str, Any, bool]] = []
        # What weak references lead to, which is looked at when nothing else is left: it may be found in other ways.
        self._later: list[tuple[int, int, str, Any, bool]] = []
        # Whether what is being looked at belongs to an installed package, and the ids of all that does.
        self._packaged = False
        self._owned: set[int] = set()
        self._visits = 0
        #: What was not looked at, since too much lies that deep; None if all was.
        self.unseen: str | None = None
        self._deeper = 0
        self._memory = MAX_BYTES_IN_ALL
        # The dicts of modules, by id, with the modules' names.
        self._namespaces: dict[int, str] = {}
        # Names that mean nothing in a module, or something built in: (name, dict of the module, key).
        self._absent: list[tuple[str, dict[Any, Any], Any]] = []
        # The keys of dicts in the order of whose items a function may have gone.
        self._ordered: dict[int, tuple[Any, ...]] = {}
        #: What is guarded of code.
        self.code = CodeGuards(is_library)
        #: In which dicts objects have their attributes.
        self.attributes = AttributeDicts()
        self._library = LibraryNames(naming.looked_up, is_library)
        self._seen: set[int] = set()
        # The ids of what weak references lead to, and of what is found in other ways.
        self._weakly: set[int] = set()
        self._strongly: set[int] = set()
        self._keep: list[Any] = [fn]
        if fn is not None:
            self._look("", torch.nn.Parameter, 0)  # what an operator does, which no code has a name for
        self._visit("", fn, 0)
        for name, root in (roots or {}).items():
            self._visit(name, root, 0)
        self._walk()
        self._close_code()
        self._weakly -= self._strongly
        self._hold_no_longer(self._weakly)
        if self._abstract:
            self._entries.append((Registrations(self._abstract), 0, True))
        self._gradients = gradients_of(gradients) if gradients else None
        if self._gradients is not None:
            self._entries.append((self._gradients, 0, True))
        #: The tensors whose ``.grad`` a backward may set.
        self.differentiable = [tensor for tensor in self.tensors if _is_leaf_of_autograd(tensor)]
        self._check: Callable[[], bool] | None = None

    def reaches(self, value: Any) -> bool:
        """Whether this very object was there when the walk was made."""
        return id(value) in self._seen

    def reaches_weakly(self, value: Any) -> bool:
        """Whether nothing but weak references led to it, so that it may be gone at any time."""
        return id(value) in self._weakly

    def has_code_for(self, name: str) -> bool:
        """Whether code of the user's has this name for anything."""
        return name in self._code_names

    # -- what a training step changes ---------------------------------------------------------------------------------

    @property
    def rates(self) -> list[dict[str, Any]]:
        """The groups of parameters of optimizers, whose learning rates schedules change."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def step_is_current(self) -> bool:
        """Whether the gradients that the callable reads are the same tensors as then, and learning rates the same."""
        return (self._gradients is None or self._gradients[0]) and self.rates_are_current()

    def rates_are_current(self) -> bool:
        """Whether learning rates that are numbers are the same as then."""
        groups = {id(group) for group in self.rates}
        rates = [(c, value) for c, key, value in self._entries if id(c) in groups and key == "lr"]
        return all(group.get("lr") is value or same(group.get("lr"), value) for group, value in rates)

    def release_rates(self, groups: Sequence[dict[str, Any]]) -> None:
        """Guard the learning rates of these groups no longer."""
        released = {id(group) for group in groups}
        self._entries = [entry for entry in self._entries if id(entry[0]) not in released or entry[1] != "lr"]
        self._check = None

    # -- what a call passes instead of finding it --------------------------------------------------------------------

    def changed_locations(self) -> tuple[Location, ...] | None:
        """Where what is another value now lies; None if something has changed that does not lie in such a location.

        What belongs to an installed package is left out, as by `restore`.
        """
        if any(not contents[0] for _, contents in self._contents if id(contents) not in self._owned):
            return None
        if self.attributes.changed() is not None:
            return None
        found: list[Location] = []
        for name, container, before in self._containers:
            if id(container) in self._owned or _shallow_equal(container, before):
                continue
            if isinstance(container, list):
                return None
            keys = _changed_keys(container, before)
            if not all(isinstance(key, IMMUTABLE) for key in keys):
                return None  # the class or a tensor of a trace, perhaps
            found += [Item(container, key, self._entry_name(name, key)) for key in keys]
        for name, owner, key, before in self._locations:
            now = _lookup(owner, key)
            if now is before or id(owner) in self._owned or (_is(now, _CODE) and before is _MISSING):
                continue
            if isinstance(owner, type):
                return None
            found.append(Item(owner, key, _join(name, key)))
        for _, cls, keys in self._classes:
            new = [key for key in vars(cls).keys() - keys if not key.startswith("__")]
            if id(cls) not in self._owned and not all(_is(vars(cls)[key], _CODE) for key in new):
                return None
        cells = [cell for cell, before in self._cells if _contents(cell) is not before]
        return (*found, *(Variable(cell, self.names.get(id(cell), "a closed-over variable")) for cell in cells))

    def release_locations(self, locations: Iterable[Location]) -> None:
        """Guard what lies in these locations no longer."""
        for location in locations:
            self._entries = [entry for entry in self._entries if not location.is_at(entry[0], entry[1])]
            self._cells = [cell for cell in self._cells if not location.is_at(cell[0], None)]
        self._check = None

    # -- where things lie ---------------------------------------------------------------------------------------------

    def items(self) -> list[tuple[Any, Any, Any]]:
        """Dicts and lists, of whatever class, with a key and what was found there."""
        return [entry for entry in self._entries if isinstance(entry[0], (dict, list))]

    def cells(self) -> list[tuple[types.CellType, Any]]:
        """Closed-over variables, and what they were."""
        return list(self._cells)

    def class_attributes(self) -> list[tuple[type, str, Any]]:
        """Classes with the name of an attribute and what it was."""
        return [(owner, key, value) for _, owner, key, value in self._locations if isinstance(owner, type)]

    def objects(self) -> list[Any]:
        """All that was looked at."""
        return list(self._keep)

    # -- tensors that are not the same at every call ------------------------------------------------------------------

    def locations(self, tensor: torch.Tensor) -> list[Item | Variable]:
        """Where this very tensor was found, if there can be another one."""
        items = [Item(container, key) for container, key, value in self._entries if value is tensor]
        return [*items, *(Variable(cell) for cell, value in self._cells if value is tensor)]

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Guard the locations of these tensors no longer, nor hold the tensors; nothing can be restored after it."""
        released = {id(tensor) for tensor in tensors}
        self._entries = [entry for entry in self._entries if id(entry[2]) not in released]
        self._cells = [cell for cell in self._cells if id(cell[1]) not in released]
        self.differentiable = [tensor for tensor in self.differentiable if id(tensor) not in released]
        self._hold_no_longer(released)
        self._containers.clear()
        self._check = None

    def forget_copies(self) -> None:
        """Keep no copies of containers, which may hold what only a weak reference leads to; nothing can be restored."""
        containers = [(name, container) for name, container, _ in self._containers if id(container) not in self._weakly]
        self._containers = [(name, container, None) for name, container in containers]

    def _hold_no_longer(self, released: set[int]) -> None:
        """Keep no objects of these ids alive for themselves."""
        if released:
            self.tensors = [tensor for tensor in self.tensors if id(tensor) not in released]
            self._keep = [value for value in self._keep if id(value) not in released]
            self._seen -= released
            self.code.release(released)
            self.attributes.release(released)

    def narrow_to_modes(self) -> None:
        """Guard only which modules there are and whether they are in training; nothing can be restored after it."""
        self._entries = [entry for entry in self._entries if _is_mode(entry[1], entry[2])]
        self._cells = [cell for cell in self._cells if _is(cell[1], torch.nn.Module)]
        self._lengths.clear()
        self._containers.clear()
        self._contents.clear()
        self._locations.clear()
        self.differentiable.clear()
        self._keep.clear()
        self.tensors.clear()
        self._absent.clear()
        self.code.clear()
        self.attributes = AttributeDicts()
        self._check = None

    # -- guards ---------------------------------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Whether everything that was reached still has the same value."""
        if self._check is None:
            self._check = self._compile_check()
        try:
            return self._check()
        except (LookupError, ValueError, RuntimeError):  # the last: a set that another thread changes
            return False

    def guards_anything(self) -> bool:
        """Whether there is anything that `is_current` looks at."""
        return bool(self._lengths or self._entries or self._cells)

    def changed(self) -> str | None:
        """The name of the first thing that has another value now, as a user would write it; None if it has none."""
        code = self.code.changed() or self.attributes.changed()
        if code is not None:
            return code
        names = {id(container): name for name, container, _ in self._containers}
        try:
            for name, variables, key in self._absent:
                if key in variables:
                    return _join(name, key)
            for container, key, expected in self._entries:
                if (module := self._namespaces.get(id(container))) is not None:
                    now = container.get(key, _MISSING)
                    if now is not expected and not same(now, expected):
                        return f"{module}.{key}"
            for container, length in self._lengths:
                if stored_length(container) != length:
                    return names.get(id(container))
            for container, key, expected in self._entries:
                if id(container) not in names:
                    continue
                now = stored_item(container, key)
                if now is not expected and not same(now, expected):
                    return self._changed_entry(names[id(container)], {key: now}, {key: expected})
            for cell, expected in self._cells:
                if _contents(cell) is not expected and not same(_contents(cell), expected):
                    return self.names.get(id(cell))
        except (LookupError, ValueError, RuntimeError):  # as in `is_current`
            pass
        return None

    def may_return(self) -> bool:
        """Whether all that differs now are plain values (a flag, a number), so that it may be as it was again.

        Where an object is another one, what was kept for the old one would only keep that alive.
        """
        try:
            if any(stored_length(container) != length for container, length in self._lengths):
                return False
            cells = ((cell.cell_contents, expected) for cell, expected in self._cells)
            items = ((stored_item(container, key), expected) for container, key, expected in self._entries)
            if any(isinstance(container, Contents) and not container[key] for container, key, _ in self._entries):
                return False
            return all(now is expected or _are_values(now, expected) for now, expected in itertools.chain(cells, items))
        except (LookupError, ValueError, RuntimeError):  # as in `is_current`
            return False

    def _compile_check(self) -> Callable[[], bool]:
        """One straight-line function over all guards: a loop would cost three times as much per call."""
        scope: dict[str, Any] = {"same": same, "stored_item": stored_item, "stored_length": stored_length}
        lines = ["def check():"]

        def bind(value: Any) -> str:
            name = f"v{len(scope)}"
            scope[name] = value
            return name

        dicts = self.dict_guards()
        # To read a version takes as long as to look up a few items.
        versioned = [guard for guard in dicts if guard.is_namespace and len(guard.entries) + len(guard.absent) > 4]
        versions = Versions(versioned, self.code.types, self.code.classes_hold)
        lines += [
            f"    if not {bind(check)}(): return False"
            for check in (versions.hold, self.code.functions_hold, self.attributes.hold)
        ]
        for guard in dicts:
            if guard not in versioned or not versions.has_dicts:
                lines += _dict_comparison(guard, bind)
        for container, length in self._lengths:
            if isinstance(container, dict):
                continue
            name = bind(container)
            if is_derived(container):
                changed = f"stored_length({name}) != {length}"
            else:
                changed = f"len({name}) != {length}" if length else name
            lines.append(f"    if {changed}: return False")
        for container, key, expected in self._entries:
            if isinstance(underlying(container), dict):
                continue
            name, index = bind(container), repr(key) if type(key) in (str, int) else bind(key)
            location = f"stored_item({name}, {index})" if is_derived(container) else f"{name}[{index}]"
            lines += _comparison(location, expected, bind)
        for cell, expected in self._cells:
            lines += _comparison(f"{bind(cell)}.cell_contents", expected, bind)
        lines.append("    return True")
        exec("\n".join(lines), scope)  # the text is made of names and literals from above only
        return scope["check"]

    def dict_guards(self) -> list[DictGuard]:
        """All that is guarded of dicts, each dict once."""
        guards: dict[int, DictGuard] = {}

        def of(container: dict[Any, Any]) -> DictGuard:
            return guards.setdefault(id(container), DictGuard(container))

        for container, length in self._lengths:
            if isinstance(container, dict):
                of(container).length = length
        for container, key, expected in self._entries:
            if isinstance(behind := underlying(container), dict):
                of(behind).entries.append((key, expected))
        for _, variables, key in self._absent:
            of(variables).absent.append(key)
        for guard in guards.values():
            keys = self._ordered.get(id(guard.container), ())
            same_keys = len(keys) == len(guard.entries) > 1 and all(
                key is mine for key, (mine, _) in zip(keys, guard.entries, strict=True)
            )
            guard.is_ordered = same_keys
            guard.is_namespace = id(guard.container) in self._namespaces
        return list(guards.values())

    # -- snapshot -------------------------------------------------------------------------------------------------

    def restore(self) -> str | None:
        """Undo every change since the walk; the name of the first thing that had changed, or None.

        What belongs to an installed package is put back without a word: a cache that knows fake tensors now. Gradients
        are not among this, see `restore_gradients`.
        """
        changed = self.attributes.put_back()
        for scaler, record in self._records:
            if not scaler[_RECORD]:  # GradScaler.update has replaced it by another one
                record.clear()
                scaler[_RECORD] = record
        for name, container, before in self._containers:
            if not _shallow_equal(container, before):
                if id(container) not in self._owned:
                    changed = changed or self._changed_entry(name, container, before)
                store(container, before)
        for name, contents in self._contents:
            if contents.restore() and id(contents) not in self._owned:
                changed = changed or name or "an object"
        for name, owner, key, before in self._locations:
            now = _lookup(owner, key)
            # Code that is imported when it is first needed may stay.
            if now is not before and not (_is(now, _CODE) and (before is None or before is _MISSING)):
                if id(owner) not in self._owned:
                    changed = changed or _join(name, key)
                _put(owner, key, before)
        for name, cls, keys in self._classes:
            for key in vars(cls).keys() - keys:
                if not key.startswith("__") and not _is(vars(cls)[key], _CODE):
                    if id(cls) not in self._owned:
                        changed = changed or _join(name, key)
                    _put(cls, key, _MISSING)
        for cell, expected in self._cells:
            if _contents(cell) is not expected:
                changed = changed or self.names.get(id(cell), "a closed-over variable")
                cell.cell_contents = expected
        return changed

    def gradients(self) -> list[torch.Tensor | None]:
        """Those of `differentiable`, for `restore_gradients`; an environment lasts, and does not keep them."""
        return [tensor.grad for tensor in self.differentiable]

    def restore_gradients(self, before: Sequence[torch.Tensor | None]) -> str | None:
        """The same for the gradients of tensors."""
        changed: str | None = None
        for tensor, grad in zip(self.differentiable, before, strict=True):
            if tensor.grad is not grad:
                changed = changed or f"{self.names.get(id(tensor), 'a tensor')}.grad"
                tensor.grad = grad
        return changed

    # -- the walk -------------------------------------------------------------------------------------------------

    def _visit(self, name: str, value: Any, depth: int, *, weakly: bool = False) -> None:
        """Have a value looked at, after all that is less deep."""
        (self._weakly if weakly else self._strongly).add(id(value))
        if not is_plain(value) and id(value) not in self._seen:
            self._visits += 1
            queue = self._later if weakly else self._queue
            heapq.heappush(queue, (depth, self._visits, name, value, self._packaged))

    def _visit_code(self, name: str, value: Any, depth: int) -> None:
        """The same for what a function was found to have a name for: helpers of helpers end somewhere."""
        if _is(value, type):
            self._made.update(map(id, value.__mro__))
        if not _is(value, types.FunctionType):
            self._visit(name, value, depth)
        elif depth < _DEEP_FUNCTIONS:
            self._visit(name, value, depth + 1)

    def _walk(self) -> None:
        while self._queue:
            depth, _, name, value, self._packaged = heapq.heappop(self._queue)
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._keep.append(value)
                self._look(name, value, depth)
            if not self._queue:  # code that is found in a module or class has names of its own
                for name, space, depth in list(self._spaces):
                    self._named(name, space, depth)
            if not self._queue and self._later:
                heapq.heappush(self._queue, heapq.heappop(self._later))

    def _look(self, name: str, value: Any, depth: int) -> None:
        if _is(value, (types.FunctionType, types.BuiltinFunctionType)) and value.__name__ in SETTINGS:
            self._code_names.add(value.__name__)  # a variable of any name holds it
        if is_weak(value):
            self._weak(name, value, depth)
        elif _is(value, types.ModuleType):
            if not is_library(vars(value).get("__name__")):
                self._spaces.append((name, value, depth))
        elif _is(value, type):
            self._class(name, value, depth)
        elif _is(value, DonatedTensor):
            pass  # whether the function uses it will show; its identity is guarded where it was found
        elif _is(value, torch.Tensor):
            self.names[id(value)] = name
            self.kinds.setdefault(id(value), "parameter" if _is(value, torch.nn.Parameter) else "closed-over")
            self.tensors.append(value)
            self.code.add_object(name, value)
            self._own_dict(name, value, depth)
        elif _is(value, functools.partial):
            self.code.add_partial(value)
            self._visit(name, value.func, depth)
            self._container(f"{name}.args", list(value.args), depth)
            self._container(f"{name}.keywords", value.keywords, depth)
            self._own_dict(name, value, depth)
        elif _is(value, types.MethodType):
            # Who has only this of it reads nothing: what functools.singledispatch has looked up outdates nothing.
            if value.__name__ != "clear" or not is_library(type(value.__self__).__module__):
                self._visit(name, value.__self__, depth)
            self._visit(name, value.__func__, depth)
        elif _is(value, types.FunctionType):
            self._function(name, value, depth)
        elif _is(value, torch.jit.ScriptModule):
            raise TraceError(
                describe(name, f"a {type(value).__name__}", expected="modules whose state lies in Python objects",
                         remedy="Transform the module that it was made from.")
            )  # fmt: skip
        elif _is(value, torch.nn.Module):
            self._module(name, value, depth)
        elif _is(value, _VIEWS):
            for behind in gc.get_referents(value):
                self._visit(name, behind, depth)
        elif _is(value, memos.Memo):
            self._memo(name, value, depth)
        elif _is(value, (threading.local, contextvars.ContextVar)):
            self._of_thread(name, value, depth)
        elif _is(value, threading.Event):
            # Compared, but not put back: other threads set it, and wait for it.
            self._entries.append((Contents(lambda: (value.is_set(),)), 0, True))
        elif _is(value, weakref.WeakSet):
            self._visit(name, value.data, depth)  # pyright: ignore[reportAttributeAccessIssue]
        elif _is(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
            self._container(name, value.data, depth)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            if _is(value, (dict, list)):
                self._container(name, value, depth)
            elif self._goes_on(name, depth):
                self._items(name, value, depth)
            if self._is_user_object(value):
                if self._goes_on(name, depth):
                    self._object(name, value, depth)
            elif (wrapped := (_attributes(value) or {}).get("__wrapped__")) is not None:
                self._visit(name, wrapped, depth)  # a transformed function's own

    def _goes_on(self, name: str, depth: int) -> bool:
        """Whether what is found this deep is looked at."""
        if depth < _DEEP:
            return True
        self._deeper += 1
        if self._deeper > _MANY_DEEPER:
            self.unseen = self.unseen or name
            return False
        return True

    def _weak(self, name: str, reference: Any, depth: int) -> None:
        """Guard that there is what a weak reference refers to, and walk that without keeping it alive."""
        self._entries.append((life_of(reference), 0, True))
        referent = referent_of(reference)
        if referent is not None:
            self._visit(name, referent, depth + 1, weakly=True)
        if _is(reference, weakref.WeakMethod):
            self._visit(name, reference._func_ref, depth)  # pyright: ignore  # as from CPython 3.11 to 3.14

    def _memo(self, name: str, memo: Any, depth: int) -> None:
        """Guard what a function's cache remembers, but not that it remembers no more, and walk it."""
        cache = memos.cache_of(memo)
        results = memos.results_of(memo)
        if cache is not None and len(results) <= _LARGE:
            self._keep.append(cache)
            # One that is full forgets some when it comes to remember others.
            is_full = len(results) == memo.cache_info().maxsize
            for key, entry, result in results:
                if not is_plain(result) or not is_full:
                    self._entries.append((cache, key, entry))
                    self._visit(f"{name}({self._key_name(key)})", result, depth + 1)
        wrapped = memo.__dict__.get("__wrapped__")
        if wrapped is not None:
            self._visit(name, wrapped, depth)
        self._own_dict(name, memo, depth)

    def _of_thread(self, name: str, value: Any, depth: int) -> None:
        """Guard and snapshot what the current thread finds, and walk it."""
        contents = contents_in_thread(value)
        self._guard_contents(name, contents)
        for key, item in items_in_thread(value).items():
            self._visit(_join(name, key), item, depth + 1)
        if not is_library(type(value).__module__):
            self.code.add_object(name, value)
            self._visit(name, type(value), depth)

    def _snapshot(self, name: str, value: Any) -> None:
        self._keep.append(value)
        self._own(value)
        self._containers.append((name, value, stored_copy(value)))

    def _guard_contents(self, name: str, contents: Contents, compared: Contents | None = None) -> None:
        """Have contents put back, and compared, or others that are ``compared`` in their stead."""
        self._contents.append((name, contents))
        self._own(contents)
        self._entries.append((contents if compared is None else compared, 0, True))

    def _own(self, owner: object) -> None:
        """Note to whom state belongs that `restore` puts back."""
        if self._packaged:
            self._owned.add(id(owner))

    def _container(self, name: str, value: Any, depth: int) -> None:
        """Guard and snapshot a dict or list, and walk its items."""
        self._snapshot(name, value)
        length = stored_length(value)
        self._lengths.append((value, length))
        if length > _LARGE or not self._goes_on(name, depth):
            return
        if _is(value, dict):
            self._ordered[id(value)] = tuple(dict.__iter__(value))
        if _is(value, collections.defaultdict):
            self._guard_contents(f"{name}.default_factory", factory_of(value))
            self._visit(f"{name}.default_factory", value.default_factory, depth)
        if _is(value, collections.OrderedDict) and length > 1:  # which keeps an order of its own
            keys = Contents(lambda: list(collections.OrderedDict.__iter__(value)))
            self._entries.append((keys, 0, True))
        for key, item in stored_items(value):
            self._entries.append((value, key, item))
            self._visit(f"{name}[{self._key_name(key)}]", item, depth + 1)

    def _key_name(self, key: Any) -> str:
        """What reports call a key; those that are tensors, as in the state of an optimizer, are not to be printed."""
        if type(key) is tuple:
            return f"({', '.join(map(self._key_name, key))})"
        return repr(key) if type(key) in IMMUTABLE else self.names.get(id(key), f"a {type(key).__name__}")

    def _entry_name(self, name: str, key: Any) -> str:
        """The name of one entry of a dict, as a user would write it."""
        if type(key) not in IMMUTABLE:
            return f"{name}[{self._key_name(key)}]"
        name = name.removesuffix("._buffers").removesuffix("._parameters").removesuffix("._modules")
        return _join(name.removeprefix("_buffers").removeprefix("_parameters"), str(key))

    def _changed_entry(self, name: str, container: Any, before: Any) -> str:
        """The name of one entry that differs."""
        if isinstance(container, dict):
            return self._entry_name(name, _changed_keys(container, before)[0])
        return name or "a list"

    def _items(self, name: str, value: Any, depth: int) -> None:
        """Guard and snapshot a container of another kind, and walk its items."""
        contents = contents_of(value, self._memory)
        if contents is not None:
            self._memory -= value.nbytes if _is(value, np.ndarray) else 0
            large = _is(value, (set, collections.deque)) and len(value) > _LARGE
            self._guard_contents(name, contents, length_of(value) if large else contents)
        items: Iterable[Any] = ()
        if _is(value, (tuple, set, frozenset, collections.deque)) and len(value) <= _LARGE:
            items = list(value)
        elif _is(value, np.ndarray) and value.dtype == object and value.size <= _LARGE:
            items = value.ravel().tolist()
        for index, item in enumerate(items):
            self._visit(f"{name}[{index}]", item, depth + 1)

    def _own_dict(self, name: str, value: Any, depth: int) -> None:
        """Guard and snapshot what lies in an object's dict, where there is anything, and walk it."""
        state = _attributes(value)
        if state is not None:
            self.attributes.add(name, value, state)
        if state:
            self._container(name, state, depth)
        elif state is not None:
            self._snapshot(name, state)
            self._lengths.append((state, 0))

    def _function(self, name: str, fn: types.FunctionType, depth: int) -> None:
        if is_library(fn.__module__) and not getattr(fn, "__pygraph_user__", False):
            self._library.add_function(fn)
            wrapped = getattr(fn, "__wrapped__", None)
            if wrapped is not None:
                self._visit(name, wrapped, depth)
            for cell in fn.__closure__ or ():
                # A library's wrapper (torch.no_grad's, torch.func's): the user's function is in its closure.
                if callable(contents := _contents(cell)):
                    self._visit(name, contents, depth)
            return
        names = naming.asked_for(fn.__code__)
        self._code_names |= names
        self.code.add_function(fn)
        self._builtins(fn.__globals__, fn.__builtins__, names)
        for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet assigned
                self._guard_contents(_join(name, variable), variable_of(cell))
                continue
            self.names[id(cell)] = variable
            self._cells.append((cell, value))
            self._seen.add(id(cell))
            self._keep.append(cell)
            if _is(value, types.ModuleType):
                self._imported(_join(name, variable), value, names, depth)
            else:
                self._visit(_join(name, variable), value, depth)
        self._variables(name, fn.__globals__, names, depth)
        imports = naming.has_imports(fn.__code__)
        for full, module in naming.imported(names, fn.__globals__.get("__package__") if imports else None).items():
            if imports:
                self._namespaces[id(sys.modules)] = "sys.modules"
                self._entries.append((sys.modules, full, module))
            self._imported(_join(name, module.__name__), module, names, depth)
        for index, default in enumerate(fn.__defaults__ or ()):
            self._visit(_join(name, f"__defaults__[{index}]"), default, depth)
        if fn.__kwdefaults__:
            self._container(_join(name, "__kwdefaults__"), fn.__kwdefaults__, depth)
        wrapped = vars(fn).get("__wrapped__")
        if wrapped is None or _is(wrapped, _CODE) or self._is_user_object(wrapped):
            self._own_dict(name, fn, depth)
            return
        # functools.wraps has copied the attributes of a library's object, which are no state of the user's.
        copied = _attributes(wrapped) or {}
        for key, item in list(vars(fn).items()):
            if key == "__wrapped__" or copied.get(key, _MISSING) is not item:
                self._entries.append((vars(fn), key, item))
                self._visit(_join(name, key), item, depth)

    def _variables(self, name: str, variables: dict[str, Any], names: set[str], depth: int) -> None:
        """Guard the variables of a module that code has names for, and walk their values."""
        outside, self._packaged = self._packaged, _is_installed(variables.get("__name__"))
        for key in sorted(names):
            value = variables.get(key, _MISSING)
            self._place(name, variables, key, value)
            if _is(value, types.ModuleType):
                self._imported(_join(name, key), value, names, depth)
            elif value is not _MISSING:
                self._visit_code(_join(name, key), value, depth)
        self._packaged = outside

    def _builtins(self, variables: dict[str, Any], builtins: dict[str, Any], names: set[str]) -> None:
        """Guard the names of code that are built in, as far as no variable of its module is called so."""
        self._library.add_names(builtins, [name for name in names if name not in variables])

    def _close_code(self) -> None:
        """Guard what all names mean in the code of libraries that was found to be used."""
        self._library.close(self._code_names)
        for fn in self._library.functions:
            self.code.add_function(fn)
        self._namespaces.update(self._library.modules)
        for variables, key, value in self._library.entries:
            if (id(variables), key) not in self._placed:
                self._entries.append((variables, key, value))
        for setting in settings_named(self._code_names, self._library.named):
            self._entries.append((Contents(setting.read), 0, True))
        if not self._code_names.isdisjoint(_ENVIRONMENT_VARIABLES):
            variables: dict[Any, Any] = os.environ._data  # pyright: ignore  # as from CPython 3.11 to 3.14
            self._namespaces[id(variables)] = "os.environ"
            self._lengths.append((variables, len(variables)))
            self._entries += [(variables, key, value) for key, value in variables.items()]

    def _imported(self, name: str, module: types.ModuleType, names: set[str], depth: int) -> None:
        """The same for a module of the user's that code has a name for; once for each code."""
        visit = (id(module), id(names))
        if visit in self._imports:
            return
        self._imports.add(visit)
        self._keep += (module, names)
        if is_library(vars(module).get("__name__")):
            self._library.add_module(module, names)
        else:
            self._variables(name, vars(module), names, depth)

    def _named(self, name: str, space: Any, depth: int) -> None:
        """Guard what any code that was found may mean by an attribute of a module, an object, or a class (methods)."""
        held: Any = space.now() if isinstance(space, AttributesBehind) else vars(space)
        for key in sorted(filter(functools.partial(self._is_named, space), held)):
            if (id(space), key) in self._named_before:
                continue
            self._named_before.add((id(space), key))
            value = held[key]
            if isinstance(space, AttributesBehind):
                self._entries.append((space.attribute(key), 0, True))
                self._visit(_join(name, key), value, depth + 1)
            elif isinstance(space, types.ModuleType):
                self._variables(name, vars(space), {key}, depth)
            elif _is(value, _METHODS):
                self._packaged = _is_installed(space.__module__)
                self._place(name, space, key, value)
                if _is(value, classmethod):
                    self._factories.add(space)
                if _is(value, functools.cached_property):
                    self._entries.append((vars(value), "func", value.func))
                for function in _functions(value):
                    self._visit_code(name, function, depth)

    def _is_named(self, space: Any, key: str) -> bool:
        """Whether code that was found may mean an attribute of a module, or run a method of a class."""
        if not isinstance(space, type):
            return key in self._code_names
        if not naming.is_making(key):
            return key in self._code_names or naming.is_called_by_interpreter(key)
        if _is_installed(space.__module__):
            return False  # what packages read where they make their objects, they would rather keep for themselves
        if id(space) in self._made or any(issubclass(space, factory) for factory in self._factories):
            return True
        return naming.may_make_others(self._code_names) and not issubclass(space, torch.nn.Module)

    def _place(self, name: str, owner: Any, key: str, value: Any) -> None:
        """Guard and snapshot a variable of a module or an attribute of a class, once."""
        if (id(owner), key) in self._placed:
            return
        self._placed.add((id(owner), key))
        self._keep.append(owner)
        self._own(owner)
        self._locations.append((name, owner, key, value))
        if not isinstance(owner, type):
            self._namespaces[id(owner)] = str(owner.get("__name__"))
            if value is _MISSING:
                self._absent.append((name, owner, key))
        if value is not _MISSING:
            self._entries.append((vars(owner) if isinstance(owner, type) else owner, key, value))

    def _module(self, name: str, module: torch.nn.Module, depth: int) -> None:
        state = module.__dict__
        self.code.add_object(name, module)
        self.attributes.add(name, module, state)
        self._snapshot(name, state)
        self._lengths.append((state, len(state)))
        for key, value in list(state.items()):
            if key in ("_parameters", "_buffers", "_modules"):
                self._snapshot(_join(name, key), value)
                self._lengths.append((value, len(value)))
                self._ordered[id(value)] = tuple(value)
                for child_name, child in list(value.items()):
                    self._entries.append((value, child_name, child))
                    self._visit(_join(name, child_name), child, depth)
                    if key == "_buffers" and child is not None:
                        self.kinds[id(child)] = "buffer"
            elif key in _HOOKS:
                self._container(_join(name, key), value, depth)
            elif key not in _MACHINERY:
                self._entries.append((state, key, value))
                self._visit(_join(name, key), value, depth)
        if isinstance(module, ParametrizationList):
            self._code_names.add(PARAMETRIZED)
        for key in _GLOBAL_HOOKS:
            self._visit(key, getattr(torch.nn.modules.module, key), depth)
        self._visit(name, type(module), depth)
        forward = type(module).forward
        if isinstance(forward, types.FunctionType):
            self._visit(name, forward, depth)

    def _class(self, name: str, cls: type, depth: int) -> None:
        """Guard the values among the attributes of a user's class and its bases, and its methods that code names."""
        self.code.add_class(cls)
        self._library.add_class(cls)
        if issubclass(type(cls), abc.ABCMeta) and id(cls) in self._made:
            self._abstract.append(cls)  # pyright: ignore[reportArgumentType]
        if not is_library(type(cls).__module__):
            self._visit(name, type(cls), depth)
        for base in cls.__mro__:
            if (base is not cls and id(base) in self._seen) or is_library(base.__module__):
                continue
            self._seen.add(id(base))
            self._keep.append(base)
            self._packaged = _is_installed(base.__module__)
            self._own(base)
            self._classes.append((name, base, frozenset(vars(base))))
            self._spaces.append((name, base, depth))
            for key, value in list(vars(base).items()):
                if issubclass(base, enum.Enum) and key not in self._code_names:
                    continue  # its members are constants; one that code has a name for may have attributes
                if not key.startswith("__") and not _is(value, (*_METHODS, *_DESCRIPTORS)):
                    self._place(name, base, key, value)
                    self._visit(_join(name, key), value, depth + 1)

    def _object(self, name: str, value: Any, depth: int) -> None:
        self.code.add_object(name, value)
        if _is(value, torch.optim.Optimizer):
            self._optimizers.append(value)
        state = _attributes(value)
        if state is not None:
            self._snapshot(name, state)
            if id(value) in self._weakly - self._strongly:
                # It belongs to somebody else, as a trainer that counts steps: not all of it concerns who refers to it.
                self._weakly.add(id(state))
                behind = AttributesBehind(value)
                self._entries.append((behind.number(), 0, True))
                self._spaces.append((name, behind, depth))
            else:
                self.attributes.add(name, value, state)
                self._lengths.append((state, len(state)))
                for key, item in list(state.items()):
                    self._entries.append((state, key, item))
                    self._visit(_join(name, key), item, depth + 1)
            record = state.get(_RECORD) if _is(value, torch.amp.GradScaler) else None
            if record is not None and not record:
                self._records.append((state, record))
        if _is(value, BaseException):
            contents = Contents(lambda: value.args, lambda args: setattr(value, "args", args))
            self._guard_contents(_join(name, "args"), contents)
            for index, item in enumerate(value.args):
                self._visit(f"{name}.args[{index}]", item, depth + 1)
        slots = slots_of(value)
        if slots is not None:
            items, contents = slots
            self._guard_contents(name, contents)
            for key, item in items.items():
                self._visit(_join(name, key), item, depth + 1)
        self._visit(name, type(value), depth)
        call = getattr(type(value), "__call__", None)  # noqa: B004  (its function is wanted, not whether it is there)
        if isinstance(call, types.FunctionType):
            self._visit(name, call, depth)

    @staticmethod
    def _is_user_object(value: Any) -> bool:
        if _is(value, _STATEFUL):
            return True
        return not is_library(type(value).__module__)


def _is(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether an object is of a class; the object, which may pass for one of another class, is not asked."""
    return issubclass(type(value), kinds)


def _comparison(location: str, expected: Any, bind: Callable[[Any], str]) -> list[str]:
    """Lines that return False unless what is at ``location`` is still ``expected``."""
    if expected is None or expected is True or expected is False:
        return [f"    if {location} is not {expected}: return False"]
    name = bind(expected)
    if has_value(expected):
        return [f"    if {location} is not {name} and not same({location}, {name}): return False"]
    return [f"    if {location} is not {name}: return False"]


def _dict_comparison(guard: DictGuard, bind: Callable[[Any], str]) -> list[str]:
    """Lines that return False unless a dict is what is guarded."""
    name = bind(guard.container)
    derived = is_derived(guard.container)
    lines: list[str] = []
    if guard.length >= 0:
        changed = f"len({name}) != {guard.length}" if guard.length else name
        changed = f"stored_length({name}) != {guard.length}" if derived else changed
        lines.append(f"    if {changed}: return False")
    for key, expected in guard.entries:
        index = repr(key) if type(key) in (str, int) else bind(key)
        lines += _comparison(f"stored_item({name}, {index})" if derived else f"{name}[{index}]", expected, bind)
    if guard.is_ordered:
        keys = bind([key for key, _ in guard.entries])
        lines.append(
            f"    if {f'[*{name}] != {keys}' if not derived else f'not {bind(guard.is_in_order)}()'}: return False"
        )
    if guard.absent:
        contains = bind(functools.partial(dict.__contains__, guard.container))
        lines.append(f"    if True in map({contains}, {bind(guard.absent)}): return False")
    return lines


def modes_of(fn: Any, roots: dict[str, Any]) -> Environment | None:
    """What may end a refusal to trace a function: its modules' modes; None where there are none, or none to find."""
    try:
        environment = Environment(fn, roots)
    except TraceError:
        return None
    environment.narrow_to_modes()
    return environment if environment.guards_anything() else None


def _is_mode(key: Any, expected: Any) -> bool:
    return (key == "training" and _is(expected, bool)) or _is(expected, torch.nn.Module)


def _are_values(now: Any, expected: Any) -> bool:
    return is_value(now) and is_value(expected)


def _changed_keys(container: Any, before: dict[Any, Any]) -> list[Any]:
    """The keys under which something else lies in a dict than before."""
    now = stored_copy(container)
    return [key for key in before | now if now.get(key, _MISSING) is not before.get(key, _MISSING)]


def _shallow_equal(container: Any, before: Any) -> bool:
    now = stored_copy(container)
    if len(now) != len(before):
        return False
    if isinstance(before, dict):
        return all(now.get(key, _MISSING) is value for key, value in before.items())
    return all(a is b for a, b in zip(now, before, strict=True))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def _is_leaf_of_autograd(tensor: torch.Tensor) -> bool:
    """Whether a backward may set the tensor's gradient; those of torch.func's tensors are its own."""
    return tensor.requires_grad and not is_functorch_wrapped_tensor(tensor) and tensor.is_leaf


def _functions(method: Any) -> list[Any]:
    """The functions behind a class's attribute."""
    if isinstance(method, property):
        return [method.fget, method.fset]
    if isinstance(method, functools.cached_property):
        return [method.func]
    return [method.__func__] if isinstance(method, (staticmethod, classmethod)) else [method]


def underlying(container: Any) -> Any:
    """The dict behind a read-only view of one, which can be watched; otherwise the container itself."""
    if isinstance(container, types.MappingProxyType):
        behind = gc.get_referents(container)
        if len(behind) == 1 and isinstance(behind[0], dict):
            return behind[0]
    return container


def _lookup(owner: Any, key: str) -> Any:
    return (vars(owner) if isinstance(owner, type) else owner).get(key, _MISSING)


def _put(owner: Any, key: str, value: Any) -> None:
    """Set a variable of a module or an attribute of a class, or delete it; a metaclass is not asked."""
    if not isinstance(owner, type):
        if value is _MISSING:
            del owner[key]
        else:
            owner[key] = value
    elif value is _MISSING:
        type.__delattr__(owner, key)
    else:
        type.__setattr__(owner, key, value)


def is_library(module: str | None) -> bool:
    """Whether what a module of this name defines is code of a library, not the user's."""
    return (module or "").partition(".")[0] in _LIBRARIES


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether a module of this name is part of an installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and any(part in _INSTALLED for part in pathlib.PurePath(file).parts)


def _join(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute
