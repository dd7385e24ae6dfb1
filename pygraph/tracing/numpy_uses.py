"""NumPy's functions on live numbers: each gets the number itself, so that its result is that of eager.

Otherwise NumPy would make arrays of objects from symbols, or compute in Python's types instead of its own. A number
that NumPy computes from numbers is computed before the call; what else it makes of them has them baked in.
"""

# Arguments are of any type. Symbols have none of these protocols themselves; checked with torch 2.13.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pygraph.tracing.computed_floats import ComputedFloat, without_source
from pygraph.tracing.live_numbers import LiveFloat, known_value
from pygraph.tracing.number_operations import numpy_result, ufunc_result

_SYMBOLS: tuple[Any, ...] = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _number(value: Any) -> Any:
    """A number as NumPy takes it, of a live one and of one that was computed of such; others as they are."""
    return known_value(value) if isinstance(value, _SYMBOLS) else without_source(value)


def _with_numbers(value: Any) -> Any:
    return pytree.tree_map(_number, value)


def _array_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    del self
    # A NumPy float that is compared with a number comes as an array.
    inputs = tuple([one[()] if type(one) is np.ndarray and one.ndim == 0 else one for one in inputs])
    found = ufunc_result(ufunc, method, inputs, kwargs)
    if found is NotImplemented and method == "__call__" and not kwargs:
        found = _with_number_of_device(ufunc, inputs)
    if found is not NotImplemented:
        return found
    return getattr(ufunc, method)(*_with_numbers(inputs), **_with_numbers(kwargs))


# What NumPy computes of doubles as Python does, where it is no error there.
_ARITHMETIC = {
    np.add: operator.add, np.subtract: operator.sub, np.multiply: operator.mul, np.true_divide: operator.truediv,
}  # fmt: skip


def _with_number_of_device(ufunc: Any, inputs: Sequence[Any]) -> Any:
    """The result of an operator of NumPy floats and numbers that only a run knows, of whose value NumPy would ask.

    Returns:
        The result; ``NotImplemented`` if NumPy is to compute it.
    """
    function = _ARITHMETIC.get(ufunc)
    known = [float(one) if type(one) in (np.float64, ComputedFloat) else one for one in inputs]
    if function is None or not all(isinstance(one, LiveFloat) or type(one) in (int, float) for one in known):
        return NotImplemented
    if function is operator.truediv and bool(known[1] == 0):
        return NotImplemented  # it is infinite, or NaN
    return function(*known)


def _array_function(self: Any, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    del self, types
    found = numpy_result(func, args, kwargs)
    if found is not NotImplemented:
        return found
    return func(*_with_numbers(args), **_with_numbers(kwargs))


def _array(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    del copy  # there is no array that could be shared
    return np.array(known_value(self), dtype)


# As a NumPy float, it needs no third protocol.
ComputedFloat.__array_ufunc__, ComputedFloat.__array_function__ = _array_ufunc, _array_function  # pyright: ignore

_PROTOCOLS = {"__array_ufunc__": _array_ufunc, "__array_function__": _array_function, "__array__": _array}


@contextlib.contextmanager
def numpy_served() -> Generator[None, None, None]:
    """Give symbols NumPy's protocols; the tracer's lock is held."""
    before = [(kind, name, vars(kind).get(name)) for kind in _SYMBOLS for name in _PROTOCOLS]
    try:
        for kind, name, _ in before:
            setattr(kind, name, _PROTOCOLS[name])
        yield
    finally:
        for kind, name, found in before:
            if found is None:
                delattr(kind, name)
            else:
                setattr(kind, name, found)
