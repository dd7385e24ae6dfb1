"""Whose code a module is: the user's, an installed package's, or a library's that is taken to have no state."""

from __future__ import annotations

import functools
import pathlib
import sys
import types
from typing import Any

from pygraph.ir.source_lines import is_in_library, is_in_standard_library

# Packages whose functions and objects are not user state.
_LIBRARIES = frozenset(sys.stdlib_module_names) | {
    "torch", "numpy", "triton", "pygraph", "functools",
    "pytest", "_pytest", "pluggy", "hypothesis",  # which put themselves into the globals of tests
}  # fmt: skip

# Where packages are installed: what their modules and classes hold (caches, registries) is not the function's doing.
_INSTALLED = ("site-packages", "dist-packages")


@functools.cache
def is_library(module: Any) -> bool:
    """Whether what a module of this name defines is code of a library, not the user's.

    A user may have given a module the name of one of the standard library. A class that is no code of Python's may have
    something else for a name: Cython's functions have one for themselves.
    """
    if not isinstance(module, str | None):
        return True
    package = (module or "").partition(".")[0]
    return package in _LIBRARIES and not (package in sys.stdlib_module_names and _is_of_user(package))


def is_library_function(fn: types.FunctionType) -> bool:
    """Whether a function is code of a library: what ``functools.wraps`` gave its module's name lies elsewhere."""
    file = fn.__code__.co_filename
    return is_library(fn.__module__) and (is_in_library(file) or _is_in_packages(file) or _is_generated(file))


def is_library_class(cls: type) -> bool:
    """Whether a class is one of a library; `types.new_class` gives the user's its own module's name."""
    module = cls.__module__
    return is_library(module) and (module != "types" or getattr(types, cls.__name__, None) is cls)


def _is_of_user(module: str) -> bool:
    """Whether a module with the name of one of the standard library lies elsewhere."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not (is_in_standard_library(file) or _is_in_packages(file))


def _is_generated(file: str) -> bool:
    """Whether code has no file, as what libraries make; what is typed into a notebook has none either."""
    return file.startswith("<") and not file.startswith(("<ipython", "<stdin"))


@functools.lru_cache(maxsize=4096)
def _is_in_packages(file: str) -> bool:
    return any(part in _INSTALLED for part in pathlib.PurePath(file).parts)


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module of this name is part of an installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and _is_in_packages(file)
