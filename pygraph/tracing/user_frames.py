"""Frames of user code: some questions about a value count only if user code asks them, not torch or pygraph."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from pygraph.ir.source_lines import PYGRAPH_FOLDER, TORCH_FOLDER, is_in_standard_library

_TORCH_AND_PYGRAPH = (TORCH_FOLDER, PYGRAPH_FOLDER)
_CALLS = ("CALL", "PRECALL")  # Python 3.11 runs an isinstance() that is called often in the latter


def called_by_user(depth: int, question: Callable[[types.CodeType], frozenset[int]] | None) -> bool:
    """Whether the frame ``depth`` frames from here is the user's, or of the standard library and called by the user.

    Args:
        depth: The number of frames from here; 1 is the caller of this function.
        question: Returns the instructions of user code that count; None if all do.
    """
    return is_user_frame(sys._getframe(depth), question)  # pyright: ignore[reportPrivateUsage]


def is_of_user() -> bool:
    """Whether code of the user's, or of the standard library that the user calls, has led to code of pygraph's."""
    frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.startswith(PYGRAPH_FOLDER):
        frame = frame.f_back
    return is_user_frame(frame)


def is_user_frame(frame: Any, question: Callable[[types.CodeType], frozenset[int]] | None = None) -> bool:
    """Whether a frame, or the caller of one in the standard library, is neither torch's nor pygraph's.

    Args:
        frame: The frame.
        question: Returns the instructions of user code that count; None if all do.
    """
    direct = True
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TORCH_AND_PYGRAPH):
            return False
        if not is_in_standard_library(name):
            return not direct or question is None or frame.f_lasti in question(frame.f_code)
        direct = direct and frame.f_code.co_name == "__instancecheck__"
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=4096)
def type_questions(code: types.CodeType) -> frozenset[int]:
    """The offsets of the instructions that ask for a value's type.

    Torch's compiled code looks at classes of arguments too, as if the function that calls it did. So what counts is
    ``isinstance(…)``, whose call starts in the source where its name does, ``.__class__`` and ``case float():``.
    """
    found: set[int] = set()
    names: set[Any] = set()
    for instruction in dis.get_instructions(code):
        position = instruction.positions and (instruction.positions.lineno, instruction.positions.col_offset)
        if instruction.argval in ("isinstance", "issubclass"):
            names.add(position)
        asks = instruction.opname == "MATCH_CLASS" or instruction.argval == "__class__"
        if asks or (instruction.opname.startswith(_CALLS) and position in names):
            found.add(instruction.offset)
    return frozenset(found)
