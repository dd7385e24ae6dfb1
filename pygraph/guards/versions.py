"""The interpreter's own version numbers of dicts and classes, read from Python.

CPython gives a dict (3.11 and 3.12) and a class another number at every change. Where the numbers are as they were,
nothing has to be compared. C++ reads them in `native/dict_guards.h` and `native/code_guards.h`; this is for calls that
take the path in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pygraph.guards.dicts import DictGuard


class Versions:
    """Guards that are compared only where a version is another one than when they held last.

    Args:
        dicts: Guards of dicts.
        classes: Classes, which stand for their bases.
        classes_hold: Compares all classes by what they hold.

    Attributes:
        has_dicts: Whether the versions of dicts can be read; if not, `hold` leaves dicts to others.
    """

    def __init__(self, dicts: Sequence[DictGuard], classes: Sequence[type], classes_hold: Callable[[], bool]) -> None:
        self.has_dicts = _has_dict_versions()
        self._dicts = list(dicts) if self.has_dicts else []
        self._classes = list(classes)
        self._classes_hold = classes_hold
        found = [_version_of_dict(guard.container) for guard in self._dicts]
        self._has_classes = _has_type_versions()
        self._numbers: list[Any] = [*found, *(map(_version_of_class, classes) if self._has_classes else ())]
        self._seen = [_UNSEEN] * len(self._numbers)

    def hold(self) -> bool:
        """Whether all is as it was."""
        if [number.value for number in self._numbers] == self._seen:
            return self._has_classes or self._classes_hold()
        return self._look()

    def _look(self) -> bool:
        for cls in self._classes:
            _assign_version(cls)
        now = [number.value for number in self._numbers]  # before looking: what changes meanwhile is looked at again
        count = len(self._dicts)
        for guard, version, seen in zip(self._dicts, now, self._seen, strict=False):
            if version != seen and not guard.holds():
                return False
        is_same = self._has_classes and now[count:] == self._seen[count:]
        if not is_same and not self._classes_hold():
            return False
        self._seen = now[:count] + [version or _UNSEEN for version in now[count:]]
        return True


# Of the fields of PyDictObject (3.11 and 3.12) and of PyTypeObject (3.11 to 3.14), in machine words; a build of the
# interpreter that lays them out in another way is found out by trying.
_DICT_WORD, _TYPE_WORD = 3, 48

_WORD = ctypes.sizeof(ctypes.c_void_p)


# A number that is no version. A class for which the interpreter has no version left has 0, and is looked at every time.
_UNSEEN = -1


def _version_of_dict(owner: dict[Any, Any]) -> ctypes.c_uint64:
    """The version field of a dict; valid as long as the dict is alive."""
    return ctypes.c_uint64.from_address(id(owner) + _WORD * _DICT_WORD)


def _version_of_class(cls: type) -> ctypes.c_uint:
    """The version field of a class; valid as long as the class is alive."""
    return ctypes.c_uint.from_address(id(cls) + _WORD * _TYPE_WORD)


def _assign_version(cls: type) -> None:
    """Have the interpreter give a class a version, as it does at the first look-up after a change."""
    with contextlib.suppress(AttributeError):
        type.__getattribute__(cls, "__init__")


@functools.cache
def _has_dict_versions() -> bool:
    if sys.version_info >= (3, 13) or _WORD != 8:
        return False
    tried: dict[str, int] = {"a": 0}
    version = ctypes.c_uint64.from_address(id(tried) + _WORD * _DICT_WORD)
    seen = [version.value]
    for step in (lambda: tried.update(a=1), lambda: tried.update(b=2), lambda: tried.pop("b")):
        step()
        seen.append(version.value)
    return tried["a"] == 1 and version.value == seen[-1] and len(set(seen)) == len(seen)


@functools.cache
def _has_type_versions() -> bool:
    if _WORD != 8 or sys.implementation.name != "cpython":
        return False
    base: Any = type("Base", (), {"a": 0})
    derived: Any = type("Derived", (base,), {})
    version = ctypes.c_uint.from_address(id(derived) + _WORD * _TYPE_WORD)
    seen: list[int] = []
    for value in range(3):
        base.a = value
        _assign_version(derived)
        seen.append(version.value)
    _assign_version(derived)
    return version.value == seen[-1] != 0 and len(set(seen)) == len(seen)
