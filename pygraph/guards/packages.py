"""Whose code a module is: the user's, an installed package's, or a library's that is taken to have no state."""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Any

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

    A class that is no code of Python's may have something else for it: Cython's functions have one for themselves.
    """
    return not isinstance(module, str | None) or (module or "").partition(".")[0] in _LIBRARIES


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module of this name is part of an installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and any(part in _INSTALLED for part in pathlib.PurePath(file).parts)
