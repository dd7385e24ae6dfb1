"""Conditions on numbers: comparisons by which a function decides, and that a call can make before it runs.

A trace in which ``if count % 4 == 0`` was true is good for every count for which it is. So the outcome of the
comparison is part of a call's key, and the number is live. That is done where the comparison is exact outside of the
function, too: of integers that are computed from integers, or of a number with a constant.
"""

# Symbols have no types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import sympy  # pyright: ignore[reportMissingTypeStubs]
from torch.utils._sympy.functions import (  # checked with torch 2.11 and 2.13
    FloatTrueDiv,
    FloorDiv,
    IntTrueDiv,
    Mod,
    PythonMod,
    ToFloat,
)

from pygraph.guards.locations import Location
from pygraph.tracing.number_uses import NAME


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison in a trace.

    Attributes:
        text: The comparison of ``n0``, ``n1`` and so on, in Python.
        paths: The arguments that these stand for, as errors call them.
    """

    text: str
    paths: tuple[str, ...]


NAMES = {"math": math, "np": np}
"""Names in the texts of numbers, besides Python's own functions."""


@dataclasses.dataclass(frozen=True, eq=False)
class Condition:
    """A comparison of numbers that calls find.

    Attributes:
        text: The comparison, of ``b0``, ``b1`` and so on.
        bases: Where these are found: locations, and ``args`` or ``kwargs`` for the arguments of a call.
    """

    text: str
    bases: tuple[Location | str, ...]
    _check: Callable[..., Any] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        names = ", ".join(f"b{index}" for index in range(len(self.bases)))
        object.__setattr__(self, "_check", eval(f"lambda {names}: {self.text}", NAMES))

    def outcome(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outcome of the comparison in a call; one that cannot be made has an outcome of its own."""
        try:
            found = [
                base.get() if isinstance(base, Location) else args if base == "args" else kwargs for base in self.bases
            ]
            outcome = self._check(*found)
        except NO_OUTCOME:
            return "undefined"
        return None if outcome is None else bool(outcome)

    def is_same(self, other: Condition) -> bool:
        """Whether another condition makes the same comparison."""
        return (
            self.text == other.text
            and len(self.bases) == len(other.bases)
            and all(map(_is_same_base, self.bases, other.bases))
        )


def _is_same_base(one: Location | str, other: Location | str) -> bool:
    if isinstance(one, Location) and isinstance(other, Location):
        return one.is_same(other)
    return isinstance(one, str) and one == other


NO_OUTCOME = (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, Warning)
"""Errors of comparisons that cannot be made; in the call, the function raises them where it comes to them."""

BaseOf = Callable[[str], tuple[Location | str, str] | None]
"""Where a call finds the argument of a path, and the rest of its path from there."""


def condition_of(comparison: Comparison, base_of: BaseOf) -> Condition | None:
    """The condition that calls can check for a comparison in a trace; None if there is none.

    Args:
        comparison: The comparison.
        base_of: Returns, for the path of an argument, where it is found in a call and the rest of the path.
    """
    found = [base_of(path) for path in comparison.paths]
    known = [base for base in found if base is not None and _SUBSCRIPTS.fullmatch(base[1])]
    if len(known) < len(found):
        return None
    text = re.sub(r"\bn(\d+)\b", lambda name: f"b{name[1]}{known[int(name[1])][1]}", comparison.text)
    return Condition(text, tuple(base for base, _ in known))


_SUBSCRIPTS = re.compile(r"(\[\d+\]|\['\w+'\])*")


def comparison_in(text: str, paths: Sequence[str]) -> Comparison:
    """The comparison that a text is of, in which ``n3`` stands for the third leaf.

    Args:
        text: The text.
        paths: What errors call each leaf.

    >>> comparison_in("((1 + n3) % 4) == 0", ["args[0]", "args[1]", "args[2]", "args[3]"])
    Comparison(text='((1 + n0) % 4) == 0', paths=('args[3]',))
    """
    leaves = list(dict.fromkeys(int(name) for name in NAME.findall(text)))
    renamed = NAME.sub(lambda name: f"n{leaves.index(int(name[1]))}", text)
    return Comparison(renamed, tuple(paths[leaf] for leaf in leaves))


def guard_text(guard: Any, names: Mapping[Any, str]) -> str | None:
    """The comparison that a guard of a trace stands for, in Python; None if it is not exact outside of it.

    Args:
        guard: What was found to be true.
        names: What stands for each symbol.

    >>> from torch.utils._sympy.functions import Mod
    >>> count = sympy.Symbol("s0", integer=True)
    >>> guard_text(sympy.Eq(Mod(count + 1, 4), 0), {count: "n0"})
    '((1 + n0) % 4) == 0'
    """
    if isinstance(guard, (sympy.And, sympy.Or)) and all(symbol.is_integer for symbol in guard.free_symbols):
        parts = [guard_text(part, names) for part in guard.args]
        if None in parts:
            return None
        return (" and " if isinstance(guard, sympy.And) else " or ").join(f"({part})" for part in parts)
    if not isinstance(guard, sympy.core.relational.Relational):
        return None
    symbols = guard.free_symbols
    if not symbols or any(symbol not in names for symbol in symbols):
        return None
    if guard.lhs.is_number:
        guard = guard.reversed
    left, right = _text(guard.lhs, names), _text(guard.rhs, names)
    if left is None or right is None:
        return None
    constant: Any = guard.rhs
    is_value = constant.is_Integer and guard.lhs.is_Symbol
    if isinstance(guard, sympy.Eq) and (is_value or (constant.is_Float and float(constant) not in _TESTED)):
        return None  # the number itself, which something has asked for
    sign, opposite = next(signs for kind, signs in _SIGNS if isinstance(guard, kind))
    if isinstance(guard, (sympy.Eq, sympy.Ne)) or all(symbol.is_integer for symbol in symbols):
        return f"{left} {sign} {right}"
    # Neither holds for what is no number: it has an outcome of its own.
    return f"{left} {sign} {right} or ({left} {opposite} {right} and None)"


# Numbers that code compares others with; any other to which one is equal is its own value.
_TESTED = (0.0, 1.0, -1.0)

_SIGNS: Sequence[tuple[Any, tuple[str, str]]] = (
    (sympy.Eq, ("==", "!=")), (sympy.Ne, ("!=", "==")), (sympy.Le, ("<=", ">")), (sympy.Lt, ("<", ">=")),
    (sympy.Ge, (">=", "<")), (sympy.Gt, (">", "<=")),
)  # fmt: skip


def number_text(expression: Any, names: Mapping[Any, str]) -> str | None:
    """An integer in Python; None if it might be another one there.

    Args:
        expression: The number.
        names: What stands for each symbol.
    """
    return _text(expression, names) if expression.free_symbols <= names.keys() else None


def _text(expression: Any, names: Mapping[Any, str]) -> str | None:
    """An expression in Python; None if the result might be another one there."""
    if expression.is_Symbol:
        return names[expression]
    if expression.is_Integer:
        return str(int(expression))
    if expression.is_Float:
        value = float(expression)
        return repr(value) if math.isfinite(value) else None
    if not all(symbol.is_integer for symbol in expression.free_symbols):
        return None  # sums of floats may be added in another order
    parts = [_text(argument, names) for argument in expression.args]
    operator = next((text for kind, text in _INTEGER_OPERATORS if isinstance(expression, kind)), None)
    if operator is None or None in parts:
        return None
    if operator != "/" and not all(argument.is_integer for argument in expression.args):
        return None
    if operator == "float":
        return f"float({parts[0]})"
    return f"({f' {operator} '.join(filter(None, parts))})"


_INTEGER_OPERATORS: Sequence[tuple[Any, str]] = (
    (sympy.Add, "+"), (sympy.Mul, "*"), (Mod, "%"), (PythonMod, "%"), (FloorDiv, "//"), (ToFloat, "float"),
    (IntTrueDiv, "/"), (FloatTrueDiv, "/"),
)  # fmt: skip
