"""Iterators and random generators whose classes are written in Python: their methods are watched during a trace."""

# Iterators give values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
from collections.abc import Callable, Generator
from typing import Any

import sympy.core.random  # pyright: ignore[reportMissingTypeStubs]
from torch.utils.data import dataloader  # its _BaseDataLoaderIter: checked with torch 2.13

from pygraph.guards.iterators import PYTHONS_GENERATOR
from pygraph.ir.source_lines import PYGRAPH_FOLDER
from pygraph.tracing.user_frames import is_user_frame


@contextlib.contextmanager
def watched_classes(is_asking: Callable[[], bool], refuse: Callable[[object], None]) -> Generator[None, None, None]:
    """Refuse to iterate over data loaders, and to draw from generators of `random` other than the one of its functions.

    A data loader draws the seed of its workers from torch's generator, which would not be repeated either.

    Args:
        is_asking: Returns whether the traced function is running here.
        refuse: Raises an error for an iterator or a random generator.
    """
    loaders: Any = dataloader
    watched = [(loaders.DataLoader, "__iter__"), (loaders._BaseDataLoaderIter, "__next__")]
    watched += [(random.Random, name) for name in ("random", "getrandbits", "seed", "setstate", "getstate")]
    watched += [(random.SystemRandom, name) for name in ("random", "getrandbits")]
    made: list[object] = []  # random generators that the function has made itself
    with contextlib.ExitStack() as undo:  # an error while one method is restored keeps no other from it
        for generator in _ALGEBRA:  # which draws for nearly all that it is asked: that of the class would cost much
            for name in ("random", "getrandbits"):
                setattr(generator, name, getattr(generator, name))
                undo.callback(vars(generator).pop, name, None)
        for cls, name in watched:
            undo.callback(_watch(cls, name, PYTHONS_GENERATOR, made, is_asking, refuse))
        yield


_ALGEBRA = [value for value in vars(sympy.core.random).values() if isinstance(value, random.Random)]
"""The random generators of sympy, which computes the sizes of traces."""


def _is_algebra(frame: Any) -> bool:
    """Whether sympy asks, which draws random numbers when it simplifies sizes for the trace."""
    while frame is not None and frame.f_code.co_filename == random.__file__:
        frame = frame.f_back
    return frame is not None and f"{os.sep}sympy{os.sep}" in frame.f_code.co_filename


def _is_idle(frame: Any) -> bool:
    """Whether what is drawn decides nothing: in a module that is imported in the trace, or for the name of a lock.

    Who makes a lock may hold another one meanwhile, for ever if an error ends the trace there (tqdm's first bar).
    """
    while frame is not None and not frame.f_code.co_filename.startswith(PYGRAPH_FOLDER):
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>" or frame.f_globals.get("__name__") == _LOCKS:
            return True
        frame = frame.f_back
    return False


_LOCKS = "multiprocessing.synchronize"


def _watch(
    cls: type,
    name: str,
    shared: object,
    made: list[object],
    is_asking: Callable[[], bool],
    refuse: Callable[[object], None],
) -> Callable[[], None]:
    """Replace a method of a class by one that refuses to be called by the traced function; returns what undoes it."""
    original: Any = getattr(cls, name)
    own = name in vars(cls)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_code is random.Random.__init__.__code__ and args and args[0] is not None:
            made.append(self)  # by the function, with a seed: it draws the same at every call
        is_allowed = self is shared or any(self is one for one in made)
        if not is_allowed and is_asking() and is_user_frame(frame) and not (_is_algebra(frame) or _is_idle(frame)):
            refuse(self)
        return original(self, *args, **kwargs)

    setattr(cls, name, method)
    return functools.partial(setattr, cls, name, original) if own else functools.partial(delattr, cls, name)
