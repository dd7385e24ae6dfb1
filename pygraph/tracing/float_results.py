"""Results of operations of which some number is a float: what Python gives, also of NaN and infinities.

A number of the device is not known while a function is traced. So an operation that may raise an error of it, or give
no float, is a node of the graph only where the number is found to be none of these: `1 / v` asks for ``v == 0`` before,
which is an outcome and no number. Where it is zero, the number is asked for, and the error is eager's.
"""

# Numbers are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pygraph.tracing.live_numbers import Live, LiveFloat, LiveInt, Source, computed_number
from pygraph.tracing.number_nodes import number_node
from pygraph.tracing.number_uses import NumberUses
from pygraph.tracing.user_frames import is_of_user

_DIVIDING = (operator.truediv, operator.floordiv, operator.mod)
_COMPARING = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)

# Python computes with smaller numbers without an overflow, whatever it does with them once.
_LARGE = 1e300
_LARGEST_EXPONENT = 700.0


def _is_finite(number: Any) -> bool:
    return bool(abs(number) <= _LARGE)


# By function of `math`, whether it gives a float of a number. It asks for no more than outcomes.
_DEFINED: Mapping[Callable[..., Any], Callable[[Any], bool]] = {
    math.sqrt: lambda number: not number < 0,
    math.log: lambda number: not number <= 0,
    math.log2: lambda number: not number <= 0,
    math.log10: lambda number: not number <= 0,
    math.log1p: lambda number: not number <= -1,
    math.exp: lambda number: not number > _LARGEST_EXPONENT,
    math.expm1: lambda number: not number > _LARGEST_EXPONENT,
    math.sin: _is_finite,
    math.cos: _is_finite,
    math.tan: _is_finite,
}

# By function of `math` that takes every number, what it gives.
_GIVES: Mapping[Callable[..., Any], type] = {
    math.isnan: bool, math.isinf: bool, math.isfinite: bool, math.fabs: float, math.atan: float, math.tanh: float,
    math.erf: float,
}  # fmt: skip


def gives_float(function: Callable[..., Any], operands: Sequence[Any]) -> bool:
    """Whether an operator gives a float of numbers, or compares one."""
    return function is operator.truediv or any(issubclass(type(one), (float, LiveFloat)) for one in operands)


def is_known_number(value: object) -> bool:
    """Whether a value is a number of Python's own, or a live one, of which the operators here are."""
    return type(value) in (bool, int, float) or issubclass(type(value), (LiveInt, LiveFloat))


def of_host(function: Callable[..., Any], operands: Sequence[Any], found: tuple[Source, NumberUses]) -> Any:
    """The symbol of a float that is computed from numbers which are passed; None if torch's is to be taken.

    Args:
        function: The operator.
        operands: What it is of.
        found: What the result is made of, and what notes that.
    """
    source, uses = found
    if function in _COMPARING:
        return None
    symbol = number_node(function, operands, float, source.value)
    if symbol is not None:
        uses.add_symbol(symbol.node.expr, source.text, source.leaves)
    return symbol


def of_device(function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """The result of an operator, of which a number of the device is an operand; None if torch's is to be taken."""
    known = [known_or_live(one) for one in operands]
    if not any(map(_is_of_device, known)):
        return function(*known)
    if not _is_defined(function, known):
        return function(*map(value_of, known))
    return _node(function, known, bool if function in _COMPARING else float)


def of_function(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The result of a function of one float of the device; None if that cannot be computed in a run."""
    if len(args) != 1 or not issubclass(type(args[0]), LiveFloat):
        return None
    number = known_or_live(args[0])
    if not _is_of_device(number):
        return None
    if function in _GIVES:
        return _node(function, [number], _GIVES[function])
    is_defined = _DEFINED.get(function)
    return _node(function, [number], float) if is_defined is not None and is_defined(number) else None


def rounded(function: Callable[..., Any], number: Any, digits: Sequence[Any]) -> Any:
    """The result of a function that rounds a float of the device; None if torch's is to be taken."""
    known = known_or_live(number)
    if not isinstance(known, Live):
        return function(known, *digits)
    if digits and digits[0] is not None:
        is_plain = type(digits[0]) is int and digits[0] >= 0
        return _node(function, [known, *digits], float) if is_plain else function(value_of(known), *digits)
    return None if _is_finite(known) else function(value_of(known), *digits)


def is_divisible_by(divisor: Any) -> bool:
    """Whether a number is not zero; of one of the device, this is an outcome that is asked for."""
    return not bool(divisor == 0)


def is_dividing(function: Callable[..., Any]) -> bool:
    """Whether an operator is an error where its second operand is zero."""
    return function in _DIVIDING


def known_or_live(number: Any) -> Any:
    """A number, in place of one of the device that has been asked for before."""
    if not _is_of_device(number):
        return number
    node = number.node
    if issubclass(type(number), LiveInt):
        known = node.maybe_as_int()
        return number if known is None else known
    known = node.shape_env.known.get(node.expr)
    return number if known is None else float(known)


def _is_live(number: Any) -> bool:
    return issubclass(type(number), Live)


def _is_of_device(number: Any) -> bool:
    """Whether a number was read from a tensor, or is computed from such, so that only a run knows it."""
    return _is_live(number) and number.source is None


def value_of(number: Any) -> Any:
    """The value of a number, on which the trace depends from now on."""
    return number.known_value() if _is_live(number) else number


def _node(function: Callable[..., Any], operands: Sequence[Any], kind: type) -> Any:
    return computed_number(number_node(function, operands, kind, None), is_of_host=are_of_host(operands))


def are_of_host(operands: Sequence[Any]) -> bool:
    """Whether an operation is of numbers of the host alone."""
    return all(not _is_live(one) or one.is_of_host for one in operands)


def _is_defined(function: Callable[..., Any], operands: Sequence[Any]) -> bool:
    """Whether an operator gives a float, or an outcome, of these numbers.

    One of the host alone, whose error comes before anything runs, is not asked for where torch's own code computes.
    """
    if any(type(one) is int and abs(one) > _LARGE for one in operands):
        return False
    is_asked = not are_of_host(operands) or is_of_user()
    if function in _DIVIDING:
        return not is_asked or is_divisible_by(operands[1])
    return function is not operator.pow or (_has_power(*operands) if is_asked else True)


def _has_power(base: Any, exponent: Any) -> bool:
    if not _is_live(base):
        return base == 1 or (base > 0 and _is_exponent_of(base, exponent))
    if _is_live(exponent) or not 0 <= exponent <= _LARGE:
        return False
    if not float(exponent).is_integer() and bool(base < 0):
        return False  # it is complex
    bound = _LARGE if exponent <= 1 else 10.0 ** (300 / exponent)
    return not bool(abs(base) > bound)


def _is_exponent_of(base: float, exponent: Any) -> bool:
    """Whether a power of a constant is no overflow."""
    bound = 300 / math.log10(base)
    return not bool(exponent > bound if base > 1 else exponent < bound)
