"""The rules of a walk, one for each kind of object, and the walk itself."""

# Objects of any type are walked.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pygraph.guards import memos
from pygraph.guards.donated import DonatedTensor
from pygraph.guards.opened import Opened
from pygraph.guards.registrations import Registrations
from pygraph.guards.settings import NAMES as SETTINGS
from pygraph.guards.walk import code_names, containers, functions, namespaces, objects, references
from pygraph.guards.walk.state import Walk

_CODE = (types.FunctionType, types.BuiltinFunctionType)

_VIEWS = (
    types.MappingProxyType,
    *(type(view) for one in ({}, collections.OrderedDict()) for view in (one.keys(), one.values(), one.items())),
)

# What `contextlib.contextmanager` makes, and what `functools.cmp_to_key` does.
_DECORATING = contextlib._GeneratorContextManager  # pyright: ignore  # private; checked with Python 3.11 and 3.12
_KEYS = type(functools.cmp_to_key(lambda one, other: 0))

# Kinds of objects and their rules; the first that fits holds. Classes are compared by `issubclass` of an object's type:
# the object itself, which may pass for one of another class, is not asked.
_RULES: tuple[tuple[Any, Callable[[Walk, str, Any, int], None]], ...] = (
    ((weakref.ReferenceType, *weakref.ProxyTypes), references.walk_weak_reference),
    (types.ModuleType, namespaces.walk_python_module),
    (type, namespaces.walk_class),
    (DonatedTensor, objects.walk_donated),
    (Opened, containers.walk_opened),
    (torch.Tensor, objects.walk_tensor),
    (functools.partial, functions.walk_partial),
    (types.MethodType, functions.walk_method),
    (types.FunctionType, functions.walk_function),
    ((types.BuiltinFunctionType, types.MethodWrapperType), functions.walk_builtin),
    ((staticmethod, classmethod), functions.walk_static_method),
    (torch.jit.ScriptModule, objects.refuse_script_module),
    (torch.nn.Module, objects.walk_module),
    (_VIEWS, containers.walk_view),
    (memos.Memo, references.walk_memo),
    ((threading.local, contextvars.ContextVar), references.walk_thread_state),
    (threading.Event, references.walk_event),
    (weakref.WeakSet, references.walk_weak_set),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), references.walk_weak_dict),
    (_DECORATING, objects.walk_decorating),
    (_KEYS, objects.walk_key),
    ((dict, list), objects.walk_dict_or_list),
    (object, objects.walk_other),
)


def walk_from(fn: Any, roots: Mapping[str, Any], *, hooks: bool = False) -> Walk:
    """Walk all that can be reached from a callable.

    Args:
        fn: A function, method, partial, or callable object; None for nothing.
        roots: Further objects, by name.
        hooks: Whether to follow the hooks of tensors.

    Raises:
        TraceError: There is something whose state cannot be seen, as a ``torch.jit.ScriptModule``.
    """
    walk = Walk(follows_hooks=hooks)
    walk.objects.append(fn)
    walk.whole, walk.own = functions.whole_of(fn), functions.instance_of(fn)
    if fn is not None:
        namespaces.walk_class(walk, "", torch.nn.Parameter, 0)  # what an operator does, which no code has a name for
    walk.visit("", fn, 0)
    for name, root in roots.items():
        walk.visit(name, root, 0)
    while not walk.is_at_end() or walk.takes_up_whole():
        while (found := walk.next()) is not None:
            _look_at(walk, *found)
        namespaces.look_up_names(walk)
    namespaces.guard_library_code(walk)
    walk.weakly -= walk.strongly
    if walk.code.abstract_classes:
        walk.guards.add_contents(Registrations(walk.code.abstract_classes))
    return walk


def _look_at(walk: Walk, name: str, value: Any, depth: int) -> None:
    cls = type(value)
    if issubclass(cls, _CODE) and value.__name__ in SETTINGS:
        walk.code.names.add(value.__name__)  # a variable of any name holds it
    if issubclass(cls, (*_CODE, type)):
        walk.code.readers.add_value(value)
    if issubclass(cls, (operator.attrgetter, operator.methodcaller)):
        texts = code_names.texts_of(value)
        walk.code.names |= texts
        walk.code.readers.add_texts(texts)
    for kinds, rule in _RULES:
        if issubclass(cls, kinds):
            rule(walk, name, value, depth)
            return
