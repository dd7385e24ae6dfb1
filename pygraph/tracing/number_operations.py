"""Operators and functions of live numbers.

A sum or a product of live numbers is a symbol that a run computes in Python, as the function does. What symbols know
nothing of (``math.cos(k)``, ``round(k)``, ``k % 0.3``) is computed before the call. Of numbers of the device, what may
raise an error or give no float is computed in a run only where the function has found that it does not, as by
``v == 0`` before ``1 / v``.
"""

# Numbers are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pygraph.ir.leaves import is_live_number
from pygraph.tracing.computed_floats import ComputedFloat, without_source
from pygraph.tracing.float_results import (
    are_of_host,
    gives_float,
    is_dividing,
    is_divisible_by,
    is_known_number,
    of_device,
    of_function,
    of_host,
    rounded,
    value_of,
)
from pygraph.tracing.live_numbers import Live, LiveBool, LiveFloat, LiveInt, Source, computed_number, known_value
from pygraph.tracing.number_uses import NumberUses, constant_text, is_short
from pygraph.tracing.user_frames import called_by_user

_UNARY = {"__neg__": "-{}", "__pos__": "+{}", "__abs__": "abs({})"}
_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OF_BITS = {"and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>"}

# Symbols compute these of floats by other formulas than Python.
_INEXACT_OF_FLOATS = ("floordiv", "mod", "pow")

# By operation, what is true of its second operand where it is no error, and gives an integer of integers.
_WITHOUT_ERROR = {
    **dict.fromkeys((operator.truediv, operator.floordiv, operator.mod), "({} != 0)"),
    **dict.fromkeys((operator.pow, operator.lshift, operator.rshift), "({} >= 0)"),
}

_METHODS = ("is_integer", "as_integer_ratio", "bit_length", "bit_count")

_ROUNDING = ("__round__", "__floor__", "__ceil__", "__trunc__")


def source_of(function: Callable[..., Any], form: str, operands: Sequence[Any]) -> tuple[Source, NumberUses] | None:
    """The numbers and operations that a result is made of; None if that cannot be told of all its operands.

    An error that the operation raises is eager's, and so is what the function does if it catches that.

    Args:
        function: The operation.
        form: Its text, with braces in place of the operands.
        operands: Numbers, of which one is live.
    """
    uses, leaves = None, frozenset[int]()
    texts: list[str] = []
    values: list[Any] = []
    for operand in operands:
        if not _is_traced(operand):
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
    if uses is None or not is_short(text):
        return None
    return Source(text, uses.result(text, leaves, lambda: function(*values)), leaves), uses


def _is_traced(operand: Any) -> bool:
    """Whether an operand is live, or was computed of live numbers."""
    return isinstance(operand, Live) or type(operand) is ComputedFloat


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
    found = take(source.text, source.value, source.leaves)
    is_computed = found is source.value and type(found) is np.float64
    return ComputedFloat.of(source, uses) if is_computed else found


def _as_inputs(source: Source, uses: NumberUses) -> Any:
    """The result that is a number, or a tuple of numbers."""
    if type(source.value) is not tuple:
        return _as_input(source, uses)
    items = enumerate(source.value)
    return tuple(_as_input(Source(f"{source.text}[{index}]", item, source.leaves), uses) for index, item in items)


# ---- operators -----------------------------------------------------------------------------------------------------


def _operator(kind: Any, name: str, form: str, function: Callable[..., Any], *, is_reflected: bool = False) -> None:
    """Define an operator of live numbers of a kind; torch's own makes the symbol of a result that is no float."""
    of_torch = kind.__mro__[2]
    is_inexact = function.__name__ in _INEXACT_OF_FLOATS
    is_shift = function is operator.lshift and is_reflected  # which symbols of torch 2.11 cannot compute

    def operate(self: Any, *others: Any) -> Any:
        operands = (*others, self) if is_reflected else (self, *others)
        found = source_of(function, form, operands)
        if found is not None and (is_shift or _is_of_host(found[0].value, is_inexact=is_inexact)):
            return _as_input(*found)
        if found is not None and function in _WITHOUT_ERROR and _is_traced(operands[1]):
            second = operands[1].source
            found[1].rely_on(_WITHOUT_ERROR[function].format(second.text), second.leaves)
        result = None
        if not all(map(is_known_number, operands)):
            return getattr(of_torch, name)(self, *others)
        if gives_float(function, operands):
            result = of_device(function, operands) if found is None else of_host(function, operands, found)
        elif found is None and is_dividing(function) and not is_divisible_by(operands[1]):
            return function(*map(value_of, operands))
        result = getattr(of_torch, name)(self, *others) if result is None else result
        return (
            computed_number(result, is_of_host=are_of_host(operands)) if found is None else _with_source(result, found)
        )

    operate.__name__ = name
    setattr(kind, name, operate)


def _with_source(result: Any, found: tuple[Source, NumberUses]) -> Any:
    for symbol, live in ((torch.SymInt, LiveInt), (torch.SymFloat, LiveFloat), (torch.SymBool, LiveBool)):
        if isinstance(result, symbol):
            return live(result.node, *found)
    return result


def _is_of_host(value: Any, *, is_inexact: bool) -> bool:
    """Whether the result of an operator is none that a run can compute as Python, or NumPy, does."""
    return type(value) not in (bool, int, float) or (type(value) is float and (is_inexact or not math.isfinite(value)))


def _operator_of_computed(name: str, form: str, function: Callable[..., Any], *, is_reflected: bool = False) -> None:
    """Define an operator of `ComputedFloat`."""

    def operate(self: ComputedFloat, *others: Any) -> Any:
        operands = (*others, self) if is_reflected else (self, *others)
        found = source_of(function, form, operands)
        if found is not None:
            return _as_input(*found)
        # NumPy would ask for the value of a number that was read from a tensor.
        plain = float if any(isinstance(one, Live) for one in others) else without_source
        return function(*(plain(one) if type(one) is ComputedFloat else one for one in operands))

    operate.__name__ = name
    setattr(ComputedFloat, name, operate)


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
            result = rounded(function, self, digits) if kind is LiveFloat else None
            result = getattr(super(Live, self), name)(*digits) if result is None else result
            return computed_number(result, is_of_host=self.is_of_host)
        return derived(short if short == "round" else f"math.{short}", function, (self, *digits))

    operate.__name__ = name
    setattr(kind, name, operate)


def _method(kind: Any, name: str) -> None:
    """Define a method of numbers that user code calls; torch has its own for some."""

    def method_of(self: Any) -> Any:
        if not called_by_user(2, None):
            return getattr(super(Live, self), name)
        if self.source is None:
            own = getattr(super(Live, self), name)
            return functools.partial(_is_whole, self) if name == "is_integer" and kind is LiveFloat else own
        getattr(self.source.value, name)  # numbers of some types do not have it
        return functools.partial(_of_method, name, self)

    setattr(kind, name, property(method_of))


def _is_whole(number: Any) -> bool:
    """Whether a float of the device is an integer: a question, for which torch would record a function of its own."""
    return bool(number % 1 == 0)


def _of_method(name: str, number: Any) -> Any:
    found = source_of(operator.methodcaller(name), f"({{}}).{name}()", (number,))
    return getattr(number.known_value(), name)() if found is None else _as_inputs(*found)


def _inverted(self: Any) -> Any:
    found = source_of(operator.invert, "(~{})", (self,))
    return -1 - self if found is None else _as_input(*found)


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
        for name in _METHODS:
            _method(kind, name)
    for name, form in _UNARY.items():
        _operator_of_computed(name, f"({form})", getattr(operator, name.strip("_")))
    for name in _ARITHMETIC:
        form, function = f"({{}} {_BINARY[name]} {{}})", getattr(operator, name)
        _operator_of_computed(f"__{name}__", form, function)
        _operator_of_computed(f"__r{name}__", form, function, is_reflected=True)
    for function_name, sign in _OF_BITS.items():
        name, function = function_name.strip("_"), getattr(operator, function_name)
        _operator(LiveInt, f"__{name}__", f"({{}} {sign} {{}})", function)
        _operator(LiveInt, f"__r{name}__", f"({{}} {sign} {{}})", function, is_reflected=True)
    setattr(LiveInt, "__invert__", _inverted)  # noqa: B010  # likewise
    for name in (*_ARITHMETIC, "and_", "or_", "xor"):
        short = name.strip("_")
        _operator_of_bool(f"__{short}__", getattr(operator, name))
        _operator_of_bool(f"__r{short}__", getattr(operator, name), is_reflected=True)
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"):
        _operator_of_bool(f"__{name}__", getattr(operator, name))


_define_operators()


# ---- functions -----------------------------------------------------------------------------------------------------


def called(name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function of numbers, or of lists and tuples of some: a number, or a tuple of numbers.

    Args:
        name: The function's name in Python.
        function: The function.
        args: What it is called with; any of it may be live.
        kwargs: Likewise, by name.
    """
    found = _source_of_call(name, function, args, kwargs)
    if found is not None:
        return _as_inputs(*found)
    result = None if kwargs else of_function(function, args)
    return function(*args, **kwargs) if result is None else result


def _source_of_call(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Source, NumberUses] | None:
    """The numbers and operations that a result is made of; None if none is live, or that cannot be told of all."""
    operands: list[Any] = []
    parts = [_form(arg, operands) for arg in args]
    parts += [f"{key}={_form(value, operands)}" for key, value in kwargs.items()]

    def of_operands(*values: Any) -> Any:
        rest = iter(values)
        return function(*[_filled(arg, rest) for arg in args], **{k: _filled(arg, rest) for k, arg in kwargs.items()})

    if not any(map(_is_traced, operands)):
        return None
    return source_of(of_operands, f"{name}({', '.join(parts)})", operands)


def _form(value: Any, operands: list[Any]) -> str:
    """The text of an argument, with braces in place of its numbers, which are appended to the operands."""
    if type(value) in (list, tuple):
        items = "".join([f"{_form(item, operands)}, " for item in value])
        return f"[{items}]" if type(value) is list else f"({items})"
    operands.append(value)
    return "{}"


def _filled(value: Any, operands: Iterator[Any]) -> Any:
    """An argument with the next operands in place of its numbers."""
    return type(value)(_filled(item, operands) for item in value) if type(value) in (list, tuple) else next(operands)


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


def numpy_result(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of another function of NumPy's for live numbers, if it is a number.

    Returns:
        The result; ``NotImplemented`` if it is another one.
    """
    if getattr(np, function.__name__, None) is not function:
        return NotImplemented
    found = _source_of_call(f"np.{function.__name__}", function, args, kwargs)
    return _as_input(*found) if found is not None and isinstance(found[0].value, np.generic) else NotImplemented
