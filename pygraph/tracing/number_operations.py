"""Operators and functions of live numbers.

A sum or a product of live numbers is a symbol that a run computes in Python, as the function does. What symbols know
nothing of, or do otherwise (``math.cos(k)``, ``round(k)``, ``k % 0.3``), is computed before the call.
"""

# Numbers are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch

from pygraph.ir.leaves import is_live_number
from pygraph.tracing.live_numbers import Live, LiveBool, LiveFloat, LiveInt, Source, known_value
from pygraph.tracing.number_uses import NumberUses, constant_text, is_short
from pygraph.tracing.patches import replaced

_UNARY = {"__neg__": "-{}", "__pos__": "+{}", "__abs__": "abs({})"}
_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")

# Symbols compute these of floats by other formulas than Python.
_INEXACT_OF_FLOATS = ("floordiv", "mod", "pow")

_ROUNDING = ("__round__", "__floor__", "__ceil__", "__trunc__")

_OF_MATH = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "comb", "copysign", "cos", "cosh",
    "degrees", "dist", "erf", "erfc", "exp", "exp2", "expm1", "fabs", "factorial", "floor", "fmod", "gamma", "gcd",
    "hypot", "isclose", "isfinite", "isinf", "isnan", "isqrt", "lcm", "ldexp", "lgamma", "log", "log10", "log1p",
    "log2", "nextafter", "perm", "pow", "radians", "remainder", "sin", "sinh", "sqrt", "tan", "tanh", "trunc", "ulp",
)  # fmt: skip


def source_of(function: Callable[..., Any], form: str, operands: Sequence[Any]) -> tuple[Source, NumberUses] | None:
    """The numbers and operations that a result is made of; None if that cannot be told of all its operands.

    An error that the operation raises is eager's.

    Args:
        function: The operation.
        form: Its text, with braces in place of the operands.
        operands: Numbers, of which one is live.
    """
    uses, leaves = None, frozenset[int]()
    texts: list[str] = []
    values: list[Any] = []
    for operand in operands:
        if not isinstance(operand, Live):
            text, value = constant_text(operand), operand
        elif operand.source is None:
            return None
        else:
            text, value, uses = operand.source.text, operand.source.value, operand.uses
            leaves |= operand.source.leaves
        if text is None:
            return None
        texts.append(text)
        values.append(value)
    text = form.format(*texts)
    return None if uses is None or not is_short(text) else (Source(text, function(*values), leaves), uses)


def derived(name: str, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """The result of a function of numbers: an input of the trace, or a value on which it depends.

    Args:
        name: The function's name in Python.
        function: The function.
        operands: What it is called with, of which one is live.
    """
    found = source_of(function, f"{name}({', '.join(['{}'] * len(operands))})", operands)
    if found is None:
        return function(*[known_value(one) if isinstance(one, Live) else one for one in operands])
    return _as_input(*found)


def _as_input(source: Source, uses: NumberUses) -> Any:
    take = uses.derive if is_live_number(source.value) else uses.decide
    return take(source.text, source.value, source.leaves)


# ---- operators -----------------------------------------------------------------------------------------------------


def _operator(kind: Any, name: str, form: str, function: Callable[..., Any], *, is_reflected: bool = False) -> None:
    """Define an operator of live numbers of a kind; torch's own makes the symbol of the result."""
    of_torch = kind.__mro__[2]
    is_inexact = function.__name__ in _INEXACT_OF_FLOATS

    def operate(self: Any, *others: Any) -> Any:
        found = source_of(function, form, (*others, self) if is_reflected else (self, *others))
        if found is not None and _is_of_host(found[0].value, is_inexact=is_inexact):
            return _as_input(*found)
        result = getattr(of_torch, name)(self, *others)
        if found is None:
            return result
        for symbol, live in ((torch.SymInt, LiveInt), (torch.SymFloat, LiveFloat), (torch.SymBool, LiveBool)):
            if isinstance(result, symbol):
                return live(result.node, *found)
        return result

    operate.__name__ = name
    setattr(kind, name, operate)


def _is_of_host(value: Any, *, is_inexact: bool) -> bool:
    """Whether the result of an operator is none that symbols can compute as Python, or NumPy, does."""
    return type(value) not in (bool, int, float) or (is_inexact and type(value) is float)


def _operator_of_bool(name: str, function: Callable[..., Any], *, is_reflected: bool = False) -> None:
    """Define an operator of comparisons, which computes with the outcome."""

    def operate(self: Any, *others: Any) -> Any:
        return function(*others, bool(self)) if is_reflected else function(bool(self), *others)

    operate.__name__ = name
    setattr(LiveBool, name, operate)


def _divided(self: Any, other: Any) -> Any:
    return self // other, self % other


def _divides(self: Any, other: Any) -> Any:
    return other // self, other % self


def _rounding(kind: Any, name: str) -> None:
    """Define a function that rounds a number; ``math`` and ``round`` call it as a method."""
    short = name.strip("_")
    function = round if short == "round" else getattr(math, short)

    def operate(self: Any, *digits: Any) -> Any:
        if self.source is None:
            return getattr(super(Live, self), name)(*digits)
        return derived(short if short == "round" else f"math.{short}", function, (self, *digits))

    operate.__name__ = name
    setattr(kind, name, operate)


def _define_operators() -> None:
    for kind in (LiveInt, LiveFloat):
        for name, form in _UNARY.items():
            _operator(kind, name, f"({form})", getattr(operator, name.strip("_")))
        for name, sign in _BINARY.items():
            function = getattr(operator, name)
            _operator(kind, f"__{name}__", f"({{}} {sign} {{}})", function)
            if name in _ARITHMETIC:
                _operator(kind, f"__r{name}__", f"({{}} {sign} {{}})", function, is_reflected=True)
        for name in _ROUNDING:
            _rounding(kind, name)
        setattr(kind, "__divmod__", _divided)  # noqa: B010  # which the class does not have of torch
        setattr(kind, "__rdivmod__", _divides)  # noqa: B010
    for name in (*_ARITHMETIC, "and_", "or_", "xor"):
        short = name.strip("_")
        _operator_of_bool(f"__{short}__", getattr(operator, name))
        _operator_of_bool(f"__r{short}__", getattr(operator, name), is_reflected=True)
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"):
        _operator_of_bool(f"__{name}__", getattr(operator, name))


_define_operators()


# ---- functions -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def math_served() -> Generator[None, None, None]:
    """Have the functions of ``math`` know live numbers, for the time of a trace."""
    with contextlib.ExitStack() as stack:
        for name in _OF_MATH:
            if hasattr(math, name):
                stack.enter_context(replaced(math, name, functools.partial(_knowing_live, f"math.{name}")))
        yield


def _knowing_live(text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def knowing(*args: Any, **kwargs: Any) -> Any:
        live = [arg for arg in args if type(arg) in (LiveInt, LiveFloat)]
        if live and not kwargs and all(arg.source is not None for arg in live):
            return derived(text, function, args)
        return function(*args, **kwargs)

    return knowing


def ufunc_result(ufunc: Any, method: str, inputs: Sequence[Any], kwargs: Any) -> Any:
    """The result of a function of NumPy's for live numbers, if it is one that numbers can be computed by.

    Returns:
        The result; ``NotImplemented`` if it is not.
    """
    name = ufunc.__name__
    if method != "__call__" or kwargs or getattr(np, name, None) is not ufunc:
        return NotImplemented
    found = source_of(ufunc, f"np.{name}({', '.join(['{}'] * len(inputs))})", inputs)
    if found is None or not isinstance(found[0].value, np.generic):
        return NotImplemented
    return _as_input(*found)
