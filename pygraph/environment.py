"""What a function can reach besides its arguments: closures, globals, modules, and the objects behind them.

A trace bakes in what it read there, so the same walk serves three ends: *guards* tell whether anything has changed
since the trace; a *snapshot* puts back what tracing changed (a traced tensor must never be left in a module); and
*names* say where a closed-over tensor was found.
"""

# Objects of any type are walked here, and isinstance leaves their items unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pygraph.donated import DonatedTensor

# Values that are compared by equality; everything else is compared by identity.
IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

# Packages whose functions and objects are not user state.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton", "pygraph", "functools"}

# A container with more entries than this (a vocabulary) is guarded by identity and length only.
_LARGE = 2000


# Functions, classes and modules are taken not to change: they are code, not state.
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)

# Attributes that every nn.Module has: hooks that run in a call, and tables that a call does not look at.
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_MACHINERY = frozenset(torch.nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"} - _HOOKS


class Environment:
    """The mutable state reachable from a callable, as it is now.

    Args:
        fn: A function, method, partial, or callable object (an ``nn.Module``).
        roots: Further objects to include, by name.
    """

    def __init__(self, fn: Any, roots: dict[str, Any] | None = None) -> None:
        self.names: dict[int, str] = {}
        self.kinds: dict[int, str] = {}
        self.tensors: list[torch.Tensor] = []
        self._containers: list[tuple[str, Any, Any]] = []
        self._lengths: list[tuple[Any, int]] = []
        self._entries: list[tuple[Any, Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._seen: set[int] = set()
        self._keep: list[Any] = [fn]
        self._visit("", fn, 0)
        for name, root in (roots or {}).items():
            self._visit(name, root, 0)
        self._grads = [(tensor, tensor.grad) for tensor in self.tensors if tensor.is_leaf and tensor.requires_grad]
        self._check: Callable[[], bool] | None = None

    # -- guards ---------------------------------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Whether everything that was reached still has the same value."""
        if self._check is None:
            self._check = self._compile_check()
        try:
            return self._check()
        except (KeyError, IndexError, ValueError):
            return False

    def _compile_check(self) -> Callable[[], bool]:
        """One straight-line function over all guards: a loop would cost three times as much per call."""
        scope: dict[str, Any] = {"same": _same}
        lines = ["def check():"]

        def bind(value: Any) -> str:
            name = f"v{len(scope)}"
            scope[name] = value
            return name

        for container, length in self._lengths:
            name = bind(container)
            changed = f"len({name}) != {length}" if length else name
            lines.append(f"    if {changed}: return False")
        for container, key, expected in self._entries:
            place = f"{bind(container)}[{key!r}]" if isinstance(key, (str, int)) else f"{bind(container)}[{bind(key)}]"
            lines += _comparison(place, expected, bind)
        for cell, expected in self._cells:
            lines += _comparison(f"{bind(cell)}.cell_contents", expected, bind)
        lines.append("    return True")
        exec("\n".join(lines), scope)  # the text is made of names and literals from above only
        return scope["check"]

    # -- snapshot -------------------------------------------------------------------------------------------------

    def restore(self) -> str | None:
        """Undo every change since the walk; the name of the first thing that had changed, or None."""
        changed: str | None = None
        for name, container, before in self._containers:
            if not _shallow_equal(container, before):
                changed = changed or _changed_entry(name, container, before)
                if isinstance(container, dict):
                    container.clear()
                    container.update(before)
                else:
                    container[:] = before
        for cell, expected in self._cells:
            if cell.cell_contents is not expected:
                changed = changed or self.names.get(id(cell), "a closed-over variable")
                cell.cell_contents = expected
        for tensor, grad in self._grads:
            if tensor.grad is not grad:
                changed = changed or f"{self.names.get(id(tensor), 'a tensor')}.grad"
                tensor.grad = grad
        return changed

    # -- the walk -------------------------------------------------------------------------------------------------

    def _visit(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, (*IMMUTABLE, types.ModuleType)) or id(value) in self._seen:
            return
        if isinstance(value, type):
            self._class(name, value)
            return
        self._seen.add(id(value))
        self._keep.append(value)
        if isinstance(value, DonatedTensor):
            return  # whether the function uses it will show; its identity is guarded where it was found
        if isinstance(value, torch.Tensor):
            self.names[id(value)] = name
            self.kinds[id(value)] = "parameter" if isinstance(value, torch.nn.Parameter) else "closed-over"
            self.tensors.append(value)
        elif isinstance(value, functools.partial):
            self._visit(name, value.func, depth)
            self._container(f"{name}.args", list(value.args), depth)
            self._container(f"{name}.keywords", value.keywords, depth)
        elif isinstance(value, types.MethodType):
            self._visit(name, value.__self__, depth)
            self._visit(name, value.__func__, depth)
        elif isinstance(value, types.FunctionType):
            self._function(name, value, depth)
        elif isinstance(value, torch.nn.Module):
            self._module(name, value, depth)
        elif isinstance(value, (dict, list)):
            self._container(name, value, depth)
        elif isinstance(value, (tuple, set, frozenset)):
            if len(value) <= _LARGE and depth < 6:
                for index, item in enumerate(value):
                    self._visit(f"{name}[{index}]", item, depth + 1)
        elif self._is_user_object(value) and depth < 6:
            self._object(name, value, depth)

    def _container(self, name: str, value: Any, depth: int) -> None:
        """Guard and snapshot a dict or list, and walk its items."""
        self._keep.append(value)
        self._containers.append((name, value, value.copy()))
        self._lengths.append((value, len(value)))
        if len(value) > _LARGE or depth >= 6:
            return
        items: Iterator[tuple[Any, Any]] = iter(value.items()) if isinstance(value, dict) else iter(enumerate(value))
        for key, item in list(items):
            self._entries.append((value, key, item))
            self._visit(f"{name}[{key!r}]", item, depth + 1)

    def _function(self, name: str, fn: types.FunctionType, depth: int) -> None:
        if _package(fn.__module__) in _LIBRARIES and not getattr(fn, "__pygraph_user__", False):
            wrapped = getattr(fn, "__wrapped__", None)
            if wrapped is not None:
                self._visit(name, wrapped, depth)
            for cell in fn.__closure__ or ():
                # A library's wrapper (torch.no_grad's, torch.func's): the user's function is in its closure.
                if callable(contents := _contents(cell)):
                    self._visit(name, contents, depth)
            return
        for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet assigned
                continue
            self.names[id(cell)] = variable
            self._cells.append((cell, value))
            self._keep.append(cell)
            self._visit(_join(name, variable), value, depth)
        for variable in _global_names(fn.__code__):
            if variable in fn.__globals__:
                value = fn.__globals__[variable]
                if not isinstance(value, _CODE):
                    self._entries.append((fn.__globals__, variable, value))
                if not isinstance(value, types.FunctionType) or depth < 4:
                    self._visit(_join(name, variable), value, depth + isinstance(value, types.FunctionType))
        for index, default in enumerate(fn.__defaults__ or ()):
            self._visit(_join(name, f"__defaults__[{index}]"), default, depth)
        if fn.__kwdefaults__:
            self._container(_join(name, "__kwdefaults__"), fn.__kwdefaults__, depth)

    def _module(self, name: str, module: torch.nn.Module, depth: int) -> None:
        state = module.__dict__
        self._containers.append((name, state, state.copy()))
        self._lengths.append((state, len(state)))
        for key, value in list(state.items()):
            if key in ("_parameters", "_buffers", "_modules"):
                self._containers.append((_join(name, key), value, value.copy()))
                if key == "_modules":
                    self._lengths.append((value, len(value)))
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
        self._class(name, type(module))
        forward = type(module).forward
        if isinstance(forward, types.FunctionType):
            self._visit(name, forward, depth)

    def _class(self, name: str, cls: type) -> None:
        """Guard the plain values among the attributes of a user's class and its bases; code is taken not to change."""
        for base in cls.__mro__:
            if id(base) in self._seen or _package(base.__module__) in _LIBRARIES:
                continue
            self._seen.add(id(base))
            self._keep.append(base)
            for key, value in list(vars(base).items()):
                if not key.startswith("__") and isinstance(value, (*IMMUTABLE, torch.Tensor)):
                    self._entries.append((vars(base), key, value))
                    self._visit(_join(name, key), value, 0)

    def _object(self, name: str, value: Any, depth: int) -> None:
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict):
            self._containers.append((name, state, state.copy()))
            self._lengths.append((state, len(state)))
            for key, item in list(state.items()):
                self._entries.append((state, key, item))
                self._visit(_join(name, key), item, depth + 1)
        self._class(name, type(value))
        call = getattr(type(value), "__call__", None)  # noqa: B004  (its function is wanted, not whether it is there)
        if isinstance(call, types.FunctionType):
            self._visit(name, call, depth)

    @staticmethod
    def _is_user_object(value: Any) -> bool:
        if isinstance(value, (torch.optim.Optimizer, types.SimpleNamespace, argparse.Namespace)):
            return True
        return _package(type(value).__module__) not in _LIBRARIES


def _comparison(place: str, expected: Any, bind: Callable[[Any], str]) -> list[str]:
    """Lines that return False unless what is at ``place`` is still ``expected``."""
    if expected is None or expected is True or expected is False:
        return [f"    if {place} is not {expected}: return False"]
    name = bind(expected)
    if isinstance(expected, IMMUTABLE):
        return [f"    if {place} is not {name} and not same({place}, {name}): return False"]
    return [f"    if {place} is not {name}: return False"]


def _same(value: Any, expected: Any) -> bool:
    return type(value) is type(expected) and isinstance(value, IMMUTABLE) and repr(value) == repr(expected)


def _changed_entry(name: str, container: Any, before: Any) -> str:
    """The name of one entry that differs, as a user would write it."""
    if isinstance(container, dict):
        keys = [*before, *(key for key in container if key not in before)]
        missing = object()
        key = next(key for key in keys if container.get(key, missing) is not before.get(key, missing))
        name = name.removesuffix("._buffers").removesuffix("._parameters").removesuffix("._modules")
        return _join(name.removeprefix("_buffers").removeprefix("_parameters"), str(key))
    return name or "a list"


def _shallow_equal(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(key in container and container[key] is value for key, value in before.items())
    return all(a is b for a, b in zip(container, before, strict=True))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def _global_names(code: types.CodeType) -> set[str]:
    """Names that code and the functions defined in it may look up in globals."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _join(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute
