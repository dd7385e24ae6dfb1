"""Opaque objects, whose state Python cannot read and every use advances: iterators, generators, files, random draws.

A replay would repeat what they gave to the trace, and not do again what it has written to them.
"""

from __future__ import annotations

import functools
import random
import sys
import types
import weakref
from typing import Any

import numpy as np
import torch

# Random generators whose state is in C.
_DRAWING = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)

# Modules in C with nothing but classes whose objects take what they are given: rows, bytes to digest or to compress.
_WRITTEN = frozenset({"_csv", "_hashlib", "_md5", "_sha1", "_sha2", "_sha3", "_blake2", "zlib"})

_RUNNING = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)

_BOUND = (types.BuiltinMethodType, types.MethodWrapperType, types.MethodType)


def is_opaque(value: object) -> bool:
    """Whether using an object, or the object of a bound method, advances a state that cannot be restored.

    An iterator that a user's class defines in Python has attributes, which are guarded and restored like any others.
    """
    if issubclass(type(value), weakref.ProxyTypes):
        return False  # its class has every method there is
    if isinstance(value, _BOUND):
        bound: object = value.__self__
        if bound is PYTHONS_GENERATOR or bound is _NUMPYS:
            return False  # the global generators, whose state can be read and set
        if isinstance(bound, random.Random):
            return isinstance(value, types.BuiltinMethodType)
        return _is_opaque_class(type(bound))
    return _is_opaque_class(type(value))


def is_generator(value: object) -> bool:
    """Whether an object is a random generator of torch's."""
    return issubclass(type(value), torch._C.Generator)  # pyright: ignore[reportPrivateUsage]


def is_generator_or_method(value: object) -> bool:
    """Whether an object is a random generator of torch's, or a bound method of one."""
    if issubclass(type(value), types.BuiltinMethodType):
        return is_generator(value.__self__)  # pyright: ignore
    return is_generator(value)


def is_drawing(value: object) -> bool:
    """Whether an object is a random generator, or another one of which all methods advance it."""
    return isinstance(value, _DRAWING) or type(value).__module__ in _WRITTEN


PYTHONS_GENERATOR: object = random.random.__self__  # pyright: ignore[reportFunctionMemberAccess]
_NUMPYS: object = np.random.random.__self__  # pyright: ignore[reportFunctionMemberAccess]


@functools.lru_cache(maxsize=4096)
def _is_opaque_class(cls: type) -> bool:
    if issubclass(cls, (*_DRAWING, *_RUNNING)) or cls.__module__ in _WRITTEN:
        return True
    for base in cls.__mro__:
        found: Any = vars(base).get("__next__")
        if found is not None:
            return not isinstance(found, types.FunctionType) or _is_standard(base.__module__)
    return False


def _is_standard(module: str) -> bool:
    """Whether a module is the standard library's, whose objects are not walked though written in Python (`csv`)."""
    return module.partition(".")[0] in sys.stdlib_module_names
