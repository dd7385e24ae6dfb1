"""Results that are no tensors and no numbers: those that may be the same object at every call."""

# Results are of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import enum
import types
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13

from pygraph.errors import TraceError, describe
from pygraph.guards.environment import Environment
from pygraph.guards.packages import is_library
from pygraph.ir.constants import IMMUTABLE

# Types with one object for each value, or of which nobody can tell that there are several.
_SINGLETONS = (
    *IMMUTABLE, type, types.ModuleType, enum.Enum, types.EllipsisType, types.NotImplementedType,
    torch.layout, torch.memory_format, torch.qscheme,
)  # fmt: skip

# Types that a tensor or a number has in a trace only.
_TYPES_OF_TRACES = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def check_static(call: str, path: str, value: Any, environment: Environment) -> None:
    """Refuse a result that each call would have to make anew.

    Args:
        call: What errors call the function.
        path: What they call the result.
        value: The result, which is neither a tensor nor a live number.
        environment: What the function could reach before the call.

    Raises:
        TraceError: It is such a result, or a class that exists in a trace only.
    """
    if type(value) is str and FakeTensor.__name__ in value:
        raise TraceError(
            describe(call, f"{path} is a text with the name of a class that a tensor has in a trace only",
                     remedy="Return no text of an error.")
        )  # fmt: skip
    if isinstance(value, type) and issubclass(value, _TYPES_OF_TRACES):
        raise TraceError(
            describe(call, f"{path} is the class of a tensor or number, which has another one in a trace",
                     remedy="Return no classes.")
        )  # fmt: skip
    if not is_static(value, environment):
        raise TraceError(
            describe(call, f"{path} is a {type(value).__name__} that it makes anew",
                     expected="tensors, numbers, and objects that were there before",
                     remedy="Return tensors in tuples, lists or dicts.")
        )  # fmt: skip


def is_static(value: Any, environment: Environment) -> bool:
    """Whether all calls may return this very object: it cannot be changed, or was there before the call.

    Args:
        value: The object.
        environment: What the function could reach before the call.
    """
    kind = type(value)
    if issubclass(kind, (torch.Tensor, *_TYPES_OF_TRACES)):
        return False
    if issubclass(kind, _SINGLETONS) or environment.reaches(value):
        return True
    parts: list[Any] | None = None
    if issubclass(kind, types.FunctionType):
        if not all(environment.reaches(cell) for cell in value.__closure__ or ()):
            return False  # it may assign to a variable that each call has anew
        parts = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif issubclass(kind, (types.BuiltinFunctionType, types.MethodType)):
        parts = [value.__self__]
    elif kind in (tuple, frozenset):
        parts = list(value)
    elif kind is slice:
        parts = [value.start, value.stop, value.step]
    elif dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # pyright: ignore
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(kind)]
    if parts is not None:
        return all(is_static(part, environment) for part in parts)
    # A library's values that are hashed by what they are (a Path, a Fraction); one's own may change their hash.
    return is_library(kind.__module__) and kind.__hash__ not in (None, object.__hash__)
