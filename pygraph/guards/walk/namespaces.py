"""Rules for modules and classes: of their attributes, only those count that code has names for.

Which names there are is known only when all code has been found, so that modules and classes are noted first;
`look_up_names` looks names up in them whenever the walk has nothing else to do.
"""

# Variables are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import abc
import enum
import functools
import os
import types
from collections.abc import Mapping
from typing import Any

import torch

from pygraph.guards.contents import Contents
from pygraph.guards.packages import is_installed, is_library, is_library_class
from pygraph.guards.report_names import join
from pygraph.guards.settings import settings_named
from pygraph.guards.snapshot import MISSING
from pygraph.guards.storage import stored_in_cell
from pygraph.guards.values import IMMUTABLE
from pygraph.guards.walk import code_names
from pygraph.guards.walk.state import Walk
from pygraph.guards.weak_references import WeakAttributes

# Functions in functions are followed this deep; of deeper ones, as long as they are no more, only names are looked at.
_DEEP_FUNCTIONS, _MANY_DEEPER = 4, 200

# Attributes of classes that are code or its machinery, not state.
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType)

# Names that code has for the environment variables of the process.
_ENVIRONMENT_VARIABLES = frozenset({"environ", "environb", "getenv"})


def walk_python_module(walk: Walk, name: str, module: types.ModuleType, depth: int) -> None:
    """Note a module of the user's, of which code may have names for variables."""
    if not is_library(vars(module).get("__name__")):
        walk.code.spaces.append((name, module, depth))


def walk_class(walk: Walk, name: str, cls: type, depth: int) -> None:
    """Guard the values among the attributes of a user's class and its bases, and its methods that code names."""
    walk.guards.code.add_class(cls)
    walk.code.library.add_class(cls)
    if issubclass(type(cls), abc.ABCMeta) and id(cls) in walk.code.callable_classes:
        walk.code.abstract_classes.append(cls)  # pyright: ignore[reportArgumentType]
    if not is_library_class(type(cls)):
        walk.visit_class_of(name, cls, depth)
    for base in cls.__mro__:
        if (base is not cls and id(base) in walk.seen) or is_library_class(base):
            continue
        walk.seen.add(id(base))
        walk.objects.append(base)
        walk.packaged = is_installed(base.__module__)
        walk.note_owner(base)
        walk.snapshot.classes.append((name, base, frozenset(vars(base))))
        walk.code.spaces.append((name, base, depth))
        for key, value in list(vars(base).items()):
            if issubclass(base, enum.Enum) and key not in walk.code.names:
                continue  # its members are constants; one that code has a name for may have attributes
            if not key.startswith("__") and not issubclass(type(value), (*_METHODS, *_DESCRIPTORS)):
                _guard_variable(walk, name, base, key, value)
                walk.visit(join(name, key), value, depth + 1)


# -- names of one function -------------------------------------------------------------------------------------------


def look_up_variables(
    walk: Walk,
    name: str,
    variables: dict[str, Any],
    keys: set[str],
    names: set[str],
    depth: int,
    attributes: Mapping[str, set[str] | None] | None = None,
) -> None:
    """Guard variables of a module that code uses, and walk their values.

    Args:
        walk: The walk.
        name: The name of the code, or of the module, in reports.
        variables: The dict of the module.
        keys: The variables.
        names: All names in the code, which may be those of attributes of modules.
        depth: The depth of the code.
        attributes: Of which variables the code asks for which attributes only, if that is known.
    """
    outside, walk.packaged = walk.packaged, is_installed(variables.get("__name__"))
    for key in sorted(keys):
        value = variables.get(key, MISSING)
        _guard_variable(walk, name, variables, key, value)
        if issubclass(type(value), types.ModuleType):
            look_up_in_module(walk, join(name, key), value, names, depth, (attributes or {}).get(key))
        elif value is not MISSING:
            _visit_code(walk, join(name, key), value, depth)
    walk.packaged = outside


def look_up_in_module(
    walk: Walk, name: str, module: types.ModuleType, names: set[str], depth: int, keys: set[str] | None = None
) -> None:
    """Guard the variables of a module that code has a name for and may use as ``module.x``; once for each code.

    Args:
        walk: The walk.
        name: The name of the module in reports.
        module: The module.
        names: All names in the code.
        depth: The depth of the code.
        keys: The attributes of the module that the code asks for, if it is known that there are no others.
    """
    pair = (id(module), id(names))
    if pair in walk.code.imported:
        return
    if keys is None:
        walk.code.imported.add(pair)
    walk.objects += (module, names)
    if is_library(vars(module).get("__name__")):
        walk.code.library.add_module(module, names)
    else:
        look_up_variables(walk, name, vars(module), names if keys is None else keys, names, depth)


def _visit_code(walk: Walk, name: str, value: Any, depth: int) -> None:
    """Visit a value that a function has a name for: helpers of helpers end somewhere."""
    if not issubclass(type(value), types.FunctionType):
        walk.visit(name, value, depth)
    elif depth < _DEEP_FUNCTIONS:
        walk.visit(name, value, depth + 1)
    else:
        _read_names(walk, value)


def _read_names(walk: Walk, fn: types.FunctionType) -> None:
    """Note which attributes a function, and the code that it names, may read, and nothing else of them."""
    code, queue = walk.code, list[Any]([fn])
    while queue and not code.readers.of_any:
        value = queue.pop()
        if id(value) in walk.seen or id(value) in code.read_only or _reads_nothing(value):
            continue
        code.read_only.add(id(value))
        walk.objects.append(value)
        if issubclass(type(value), types.FunctionType):
            queue += _named_by(value, code.add_code(value))
            code.readers.of_any |= code_names.has_imports(value.__code__)
        elif issubclass(type(value), type):
            bases = [base for base in value.__mro__ if not is_library_class(base)]
            methods = [one for base in bases for one in vars(base).values() if issubclass(type(one), _METHODS)]
            queue += [function for one in methods for function in _functions_of(one)]
        else:
            code.readers.of_any = True  # which attributes its code reads is not known
        if len(code.read_only) > _MANY_DEEPER:
            code.readers.of_any = True


def _named_by(fn: types.FunctionType, names: set[str]) -> list[Any]:
    """The values that a function closes over, and those of variables that it names; of modules, those of its names."""
    found: list[Any] = [stored_in_cell(cell) for cell in fn.__closure__ or ()]
    found += [fn.__globals__.get(key) for key in code_names.variables_of(fn.__code__)]
    modules = [value for value in found if _is_users_module(value)]
    for module in modules:  # and modules in these
        held = [vars(module).get(name) for name in sorted(names)]
        modules += [value for value in held if _is_users_module(value) and not any(value is one for one in modules)]
        found += held
    return [value for value in found if not _is_users_module(value)]


def _is_users_module(value: Any) -> bool:
    return issubclass(type(value), types.ModuleType) and not is_library(vars(value).get("__name__"))


def _reads_nothing(value: Any) -> bool:
    """Whether a value has no code of the user's, so that nothing is read where a function uses it."""
    if issubclass(type(value), types.FunctionType):
        return is_library(value.__module__)
    if issubclass(type(value), types.ModuleType):
        return is_library(vars(value).get("__name__"))
    if issubclass(type(value), type):
        return is_library_class(value)
    if issubclass(type(value), (list, tuple, dict)):
        items: Any = value.values() if issubclass(type(value), dict) else value
        return all(issubclass(type(item), IMMUTABLE) for item in items)
    kinds = (*IMMUTABLE, types.BuiltinFunctionType, torch.Tensor)
    return issubclass(type(value), kinds) or type(value).__module__.partition(".")[0] == "numpy"


def _guard_variable(walk: Walk, name: str, owner: Any, key: str, value: Any) -> None:
    """Guard and snapshot a variable of a module or an attribute of a class, once."""
    if (id(owner), key) in walk.code.guarded_variables:
        return
    walk.code.guarded_variables.add((id(owner), key))
    walk.objects.append(owner)
    walk.note_owner(owner)
    walk.snapshot.variables.append((name, owner, key, value))
    guards = walk.guards
    if not isinstance(owner, type):
        guards.namespaces[id(owner)] = str(owner.get("__name__"))
        if value is MISSING:
            guards.absent.append((name, owner, key))
    if value is not MISSING:
        guards.entries.append((vars(owner) if isinstance(owner, type) else owner, key, value))


# -- names of all code -----------------------------------------------------------------------------------------------


def look_up_names(walk: Walk) -> None:
    """Guard what any code that was found may mean by an attribute of a module, an object, or a class."""
    for name, space, depth in list(walk.code.spaces):
        held: Any = space.now() if isinstance(space, WeakAttributes) else space if type(space) is dict else vars(space)
        may_read_any = type(space) is dict and walk.code.may_read_all_in(space)
        may_be_used = functools.partial(_may_be_used, walk, space)
        for key in sorted(held if may_read_any else filter(may_be_used, held)):
            if (id(space), key) not in walk.code.looked_up:
                walk.code.looked_up.add((id(space), key))
                _look_up_attribute(walk, name, space, key, held[key], depth)


def _look_up_attribute(walk: Walk, name: str, space: Any, key: str, value: Any, depth: int) -> None:
    if isinstance(space, WeakAttributes):
        walk.packaged = walk.snapshot.is_packaged(space.now())
        walk.guards.add_contents(space.attribute(key))
        walk.visit(join(name, key), value, depth + 1)
    elif type(space) is dict:
        walk.packaged = walk.snapshot.is_packaged(space)  # and not as what was looked up before it
        walk.guards.entries.append((space, key, value))
        walk.visit(join(name, key), value, depth + 1)
    elif isinstance(space, types.ModuleType):
        look_up_variables(walk, name, vars(space), {key}, {key}, depth)
    elif issubclass(type(value), _METHODS):
        walk.packaged = is_installed(space.__module__)
        _guard_variable(walk, name, space, key, value)
        if issubclass(type(value), classmethod):
            walk.code.factories.add(space)
        if issubclass(type(value), functools.cached_property):
            walk.guards.entries.append((vars(value), "func", value.func))
        for function in _functions_of(value):
            walk.code.readers.add_method(space, function)
            _visit_code(walk, name, function, depth)


def _may_be_used(walk: Walk, space: Any, key: str) -> bool:
    """Whether code that was found may mean an attribute of a module or an object, or run a method of a class."""
    code = walk.code
    if not isinstance(space, type):
        return key in code.names
    if not code_names.is_making(key):
        return key in code.names or code_names.is_called_by_interpreter(key) or _is_called_by_library(space, key)
    if is_installed(space.__module__):
        return False  # what packages read where they make their objects, they would rather keep for themselves
    if id(space) in code.callable_classes or any(issubclass(space, factory) for factory in code.factories):
        return True
    return code_names.may_make_others(code.names) and not issubclass(space, torch.nn.Module)


def _is_called_by_library(cls: type, key: str) -> bool:
    """Whether a method takes the place of a library's, which calls it; modules have rules of their own."""
    bases = [base for base in cls.__mro__ if is_library_class(base) and base not in (object, torch.nn.Module)]
    return any(isinstance(vars(base).get(key), types.FunctionType) for base in bases)


def _functions_of(method: Any) -> list[Any]:
    """The functions behind a class's attribute."""
    if isinstance(method, property):
        return [method.fget, method.fset]
    if isinstance(method, functools.cached_property):
        return [method.func]
    return [method.__func__] if isinstance(method, (staticmethod, classmethod)) else [method]


# -- code of libraries -----------------------------------------------------------------------------------------------


def guard_library_code(walk: Walk) -> None:
    """Guard what all names mean in the code of libraries, torch's settings and environment variables that it reads."""
    code, guards = walk.code, walk.guards
    code.library.close(code.names)
    for fn in code.library.functions:
        guards.code.add_function(fn)
    guards.namespaces.update(code.library.modules)
    for variables, key, value in code.library.entries:
        if (id(variables), key) not in code.guarded_variables:
            guards.entries.append((variables, key, value))
    for setting in settings_named(code.names, code.library.named):
        guards.add_contents(Contents(setting.read))
    if not code.names.isdisjoint(_ENVIRONMENT_VARIABLES):
        environ: dict[Any, Any] = os.environ._data  # pyright: ignore  # as from CPython 3.11 to 3.14
        guards.namespaces[id(environ)] = "os.environ"
        guards.lengths.append((environ, len(environ)))
        guards.entries += [(environ, key, value) for key, value in environ.items()]
