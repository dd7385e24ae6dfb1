"""``type(x)`` and ``x.__class__`` of a traced value: the class that the value has in eager.

A tensor of a trace is a `FakeTensor`, and a live number a symbol. ``type`` is a builtin, and cannot be told of that. So
it is replaced for the time of a trace, in the modules of the functions that call it: they find it among their global
variables. Where a function has ``.__class__``, tensors of the trace look who asks. A function that the walk over what
the traced function reaches does not find sees the classes of the trace, as libraries do.
"""

# Values are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13

from pygraph.guards.environment import Environment
from pygraph.tracing.function_proxies import FunctionProxy, builtin_replaced, original_of
from pygraph.tracing.live_numbers import Live
from pygraph.tracing.proxy_trace import tracing_here
from pygraph.tracing.user_frames import called_by_user, type_questions

_NAME = "type"


class TypeFunction(FunctionProxy):
    """A proxy of ``type`` that knows traced values; to all else it is ``type``, also as a base class."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The class of a value, or a new class."""
        if len(args) != 1 or kwargs or not tracing_here():
            return type(*args, **kwargs)
        found = class_in_eager(args[0])
        return self if found is type else found

    def __getattribute__(self, name: str) -> Any:
        return getattr(original_of(self), name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, type)

    def __mro_entries__(self, bases: Any) -> tuple[type]:
        return (type,)

    def __getitem__(self, item: Any) -> Any:
        return type[item]

    def __or__(self, other: Any) -> Any:
        return type | other

    def __ror__(self, other: Any) -> Any:
        return other | type


_PROXY = TypeFunction(type)


def class_in_eager(value: Any) -> type:
    """The class that a value has where it is not traced.

    >>> class_in_eager(1), class_in_eager(torch.ones(2))
    (<class 'int'>, <class 'torch.Tensor'>)
    """
    found = type(value)
    if issubclass(found, FakeTensor):
        return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    if issubclass(found, Live):
        return value.kind
    return value.__class__ if found.__module__.startswith("pygraph.") else found


def _attribute(tensor: FakeTensor, name: str) -> Any:
    """An attribute of a tensor of a trace; to code of the user's, its class is that of eager."""
    if name == "__class__" and tracing_here() and called_by_user(2, type_questions):
        return class_in_eager(tensor)
    return object.__getattribute__(tensor, name)


@contextlib.contextmanager
def type_served(environment: Environment) -> Generator[None, None, None]:
    """Have functions of the user's find the classes of eager for the time of a trace."""
    asks = environment.has_code_for("__class__") and "__getattribute__" not in vars(FakeTensor)
    modules = [fn.__globals__ for fn in environment.functions_calling(_NAME)]
    try:
        if asks:
            FakeTensor.__getattribute__ = _attribute
        with builtin_replaced(_NAME, _PROXY, modules):
            yield
    finally:
        if asks:
            del FakeTensor.__getattribute__
