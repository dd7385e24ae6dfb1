"""Values that are compared by what they are, not by identity: immutable ones, and tuples, slices and ranges of them."""

# Tuples hold items of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import numpy as np

from pygraph.ir.constants import IMMUTABLE

_EXACT = frozenset(IMMUTABLE)
_COMPOSED = frozenset({tuple, slice, range})


def is_plain(value: object) -> bool:
    """Whether a value is of an immutable type itself: an object of a class derived from one has attributes.

    Such a class may also say of itself what it likes, so that its objects are only equal to themselves.
    """
    return type(value) in _EXACT


def has_value(value: Any) -> bool:
    """Whether another object can be the `same`."""
    kind = type(value)
    return kind in _EXACT or kind in _COMPOSED or issubclass(kind, np.generic)


def is_value(value: Any) -> bool:
    """Whether a value is made of nothing but plain ones."""
    return has_value(value) and (type(value) not in _COMPOSED or all(map(is_value, _parts(value))))


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float, or a tuple of some."""
    if type(value) is tuple:
        return bool(value) and all(map(is_number, value))
    return type(value) is float or type(value) is int


def same(value: Any, expected: Any) -> bool:
    """Whether two values are immutable and equal, down to the type and the sign of zero.

    Tuples are, if their items are the same objects or equal in this way.
    """
    kind = type(value)
    if kind is not type(expected):
        return False
    if kind is str or kind is bytes:
        return value == expected
    if kind in _EXACT:
        return repr(value) == repr(expected)
    if kind in _COMPOSED:
        these, those = _parts(value), _parts(expected)
        return len(these) == len(those) and all(a is b or same(a, b) for a, b in zip(these, those, strict=True))
    if issubclass(kind, np.generic) and not value.dtype.hasobject:
        return value.dtype == expected.dtype and value.tobytes() == expected.tobytes()
    return False


def _parts(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value.start, value.stop, value.step)
