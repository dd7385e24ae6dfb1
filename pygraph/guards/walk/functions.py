"""Rules for functions: closures, globals, imports, defaults, and the functions behind methods and partials."""

# Globals and closed-over variables are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from pygraph.guards.attributes import attributes_of
from pygraph.guards.contents import variable_of
from pygraph.guards.packages import is_library, is_library_function
from pygraph.guards.report_names import join
from pygraph.guards.storage import stored_in_cell
from pygraph.guards.walk import code_names
from pygraph.guards.walk.containers import walk_attributes, walk_container
from pygraph.guards.walk.namespaces import look_up_in_module, look_up_variables
from pygraph.guards.walk.objects import is_user_object
from pygraph.guards.walk.state import Walk

# The attribute of a function that is a part of another one, which is its value. What the other parts read is not looked
# at, as a schedule: names alone do not tell `optimizer.step()` from the function `step`.
PART_OF = "__pygraph_part_of__"

# Functions that wrap others are followed this far: one may wrap itself.
_WRAPPINGS = 16

_MISSING: Any = object()

# Kinds of objects that a decorated function may wrap, which have no attributes of their own for it to copy.
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def walk_partial(walk: Walk, name: str, partial: functools.partial[Any], depth: int) -> None:
    """Guard a ``functools.partial`` and walk its function and arguments."""
    walk.guards.code.add_partial(partial)
    walk.visit(name, partial.func, depth)
    walk_container(walk, f"{name}.args", list(partial.args), depth)
    walk_container(walk, f"{name}.keywords", partial.keywords, depth)
    walk_attributes(walk, name, partial, depth)


def walk_method(walk: Walk, name: str, method: types.MethodType, depth: int) -> None:
    """Walk the object and the function of a bound method."""
    # Who has only ``clear`` of a cache reads nothing: what functools.singledispatch has looked up outdates nothing.
    if method.__name__ != "clear" or not is_library(type(method.__self__).__module__):
        walk.visit(name, method.__self__, depth)
    walk.visit(name, method.__func__, depth)


def walk_builtin(walk: Walk, name: str, method: Any, depth: int) -> None:
    """Walk the object of a method that is written in C, as of ``log.append``; a function has its module there."""
    if not issubclass(type(method.__self__), (types.ModuleType, type)):
        walk.visit(name, method.__self__, depth)


def walk_static_method(walk: Walk, name: str, method: Any, depth: int) -> None:
    """Walk the function of a method of a class that was taken out of its dict."""
    walk.visit(name, method.__func__, depth)


def whole_of(fn: Any) -> Any:
    """The function that another one is a part of, below methods and what wraps it; None if it is no part."""
    found = (attributes_of(_function_of(one)) or {} for one in _wrappings(fn))
    return next((attributes[PART_OF] for attributes in found if PART_OF in attributes), None)


def instance_of(fn: Any) -> Any:
    """The object of a bound method, below what wraps it; None if it is none."""
    return next((one.__self__ for one in _wrappings(fn) if type(one) is types.MethodType), None)


def _wrappings(fn: Any) -> Iterator[Any]:
    """A callable, and what it wraps, step by step."""
    for _ in range(_WRAPPINGS):
        yield fn
        fn = (attributes_of(_function_of(fn)) or {}).get("__wrapped__")


def _function_of(fn: Any) -> Any:
    return fn.__func__ if type(fn) is types.MethodType else fn


def walk_function(walk: Walk, name: str, fn: types.FunctionType, depth: int) -> None:
    """Guard a function's code and walk all that it reads besides its arguments."""
    if fn is walk.whole:
        walk.skipped = name, depth
        return
    if is_library_function(fn) and not getattr(fn, "__pygraph_user__", False):
        _walk_library_function(walk, name, fn, depth)
        return
    names = walk.code.add_code(fn)
    if PART_OF not in vars(fn):
        walk.names_of_others |= names
    walk.guards.code.add_function(fn)
    # Names that are built in, as far as no variable of the module is called so.
    walk.code.library.add_names(fn.__builtins__, [key for key in names if key not in fn.__globals__])
    _walk_closure(walk, name, fn, names, depth)
    variables, attributes = code_names.variables_of(fn.__code__), code_names.attributes_of_globals(fn.__code__)
    look_up_variables(walk, name, fn.__globals__, variables, names, depth, attributes)
    _walk_imports(walk, name, fn, names, depth)
    for index, default in enumerate(fn.__defaults__ or ()):
        walk.visit(join(name, f"__defaults__[{index}]"), default, depth)
    if fn.__kwdefaults__:
        walk_container(walk, join(name, "__kwdefaults__"), fn.__kwdefaults__, depth)
    _walk_function_attributes(walk, name, fn, depth)


def _walk_library_function(walk: Walk, name: str, fn: types.FunctionType, depth: int) -> None:
    walk.code.library.add_function(fn)
    wrapped = getattr(fn, "__wrapped__", None)
    if wrapped is not None:
        walk.visit(name, wrapped, depth)
    for cell in fn.__closure__ or ():
        # A library's wrapper (torch.no_grad's, torch.func's): the user's function is in its closure.
        if callable(contents := stored_in_cell(cell)):
            walk.visit(name, contents, depth)


def _walk_closure(walk: Walk, name: str, fn: types.FunctionType, names: set[str], depth: int) -> None:
    for variable, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not yet assigned
            walk.guard_contents(join(name, variable), variable_of(cell))
            continue
        walk.names[id(cell)] = variable
        walk.guards.cells.append((cell, value))
        walk.snapshot.cells.append((cell, value))
        walk.seen.add(id(cell))
        walk.objects.append(cell)
        if issubclass(type(value), types.ModuleType):
            look_up_in_module(walk, join(name, variable), value, names, depth)
        else:
            walk.visit(join(name, variable), value, depth)


def _walk_imports(walk: Walk, name: str, fn: types.FunctionType, names: set[str], depth: int) -> None:
    """Guard the modules that a function imports, or means by ``package.module``, and the variables it uses of them."""
    imports = code_names.has_imports(fn.__code__)
    package = fn.__globals__.get("__package__") if imports else None
    for full_name, module in code_names.imported(names, package).items():
        if imports:
            walk.guards.namespaces[id(sys.modules)] = "sys.modules"
            walk.guards.entries.append((sys.modules, full_name, module))
        look_up_in_module(walk, join(name, module.__name__), module, names, depth)


def _walk_function_attributes(walk: Walk, name: str, fn: types.FunctionType, depth: int) -> None:
    wrapped = vars(fn).get("__wrapped__")
    is_librarys = wrapped is not None and not issubclass(type(wrapped), _CODE) and not is_user_object(wrapped)
    copied = (attributes_of(wrapped) or {}) if is_librarys else {}
    if copied.keys().isdisjoint(vars(fn).keys() - {"__wrapped__"}):
        walk_attributes(walk, name, fn, depth)
        return
    # functools.wraps has copied the attributes of a library's object, which are no state of the user's.
    for key, item in list(vars(fn).items()):
        if key == "__wrapped__" or copied.get(key, _MISSING) is not item:
            walk.guards.entries.append((vars(fn), key, item))
            walk.visit(join(name, key), item, depth)
