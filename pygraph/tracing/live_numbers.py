"""Symbols for numbers that pass for what they stand for when the function asks what type they are.

While it is traced, a live number is a ``torch.SymFloat`` or ``torch.SymInt``, so ``isinstance(k, float)`` would be
false where eager says true. Python looks at ``k.__class__`` before it says so; to code that is not torch's, that is the
type of what the caller passed. A number whose text is asked for is baked in. ``type(k)`` cannot be noticed.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any

import torch

_OURS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_STANDARD = ("<frozen", sysconfig.get_path("stdlib") + os.sep)
_PACKAGES = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)

_CALLS = ("CALL", "PRECALL")  # Python 3.11 runs an isinstance() that is called often in the latter


def _asked_by_user(depth: int, question: Callable[[types.CodeType], frozenset[int]] | None) -> bool:
    """Whether the code that asks is neither torch's nor ours; the standard library asks for who calls it.

    Args:
        depth: How many frames from here the code that asks is.
        question: Which instructions of the user's code ask; None if every one that comes here does.
    """
    frame: Any = sys._getframe(depth)  # pyright: ignore[reportPrivateUsage]
    direct = True
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS):
            return False
        if not name.startswith(_STANDARD) or name.startswith(_PACKAGES):
            return not direct or question is None or frame.f_lasti in question(frame.f_code)
        direct = direct and frame.f_code.co_name == "__instancecheck__"
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=4096)
def _questions(code: types.CodeType) -> frozenset[int]:
    """Offsets of the instructions that ask for a value's class.

    Torch's compiled code looks at classes of arguments too, as if the function that calls it did. So what counts is
    ``isinstance(…)``, whose call starts in the source where its name does, ``.__class__`` and ``case float():``.
    """
    found: set[int] = set()
    names: set[Any] = set()
    for instruction in dis.get_instructions(code):
        place = instruction.positions and (instruction.positions.lineno, instruction.positions.col_offset)
        if instruction.argval in ("isinstance", "issubclass"):
            names.add(place)
        asks = instruction.opname == "MATCH_CLASS" or instruction.argval == "__class__"
        if asks or (instruction.opname.startswith(_CALLS) and place in names):
            found.add(instruction.offset)
    return frozenset(found)


class _Live:
    """What both have.

    Args:
        node: The symbol.
        kind: The type of what the caller passed.
        leaf: Its position among the arguments' leaves.
        asked: Gets the leaf when user code asks for its text.
    """

    def __init__(self, node: Any, kind: type, leaf: int, asked: set[int]) -> None:
        super().__init__(node)  # pyright: ignore  # of torch's class, which comes next
        self._kind = kind
        self._leaf = leaf
        self._asked = asked

    @property
    def __class__(self) -> type:  # pyright: ignore
        """What user code is told, which is as in eager."""
        return self._kind if _asked_by_user(2, _questions) else type(self)

    def _note(self) -> None:
        if _asked_by_user(3, None):
            self._asked.add(self._leaf)

    def __repr__(self) -> str:
        self._note()
        return super().__repr__()

    def __str__(self) -> str:
        self._note()
        return super().__str__()

    def __format__(self, spec: str) -> str:
        self._note()
        return super().__format__(spec)


class LiveFloat(_Live, torch.SymFloat):
    """A float argument."""


class LiveInt(_Live, torch.SymInt):
    """An int argument."""
