"""The user's source lines: the innermost line outside of libraries, as nodes, reports and errors name it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Generator
from types import FrameType

import torch

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
PYGRAPH_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
PACKAGES_FOLDER = os.path.dirname(os.path.dirname(torch.__file__)) + os.sep
_LIBRARIES = (TORCH_FOLDER, PYGRAPH_FOLDER, f"{PACKAGES_FOLDER}triton{os.sep}", "<eval_with_key>")
_STANDARD = ("<frozen", sysconfig.get_path("stdlib") + os.sep)
_PACKAGES = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)

_files: dict[str, str | None] = {}  # by line, as `train.py:41`; None for lines of several files of that name

_attributed: contextvars.ContextVar[str | None] = contextvars.ContextVar("attributed", default=None)


def is_in_standard_library(file: str) -> bool:
    """Whether a file of code belongs to the standard library."""
    return file.startswith(_STANDARD) and not file.startswith(_PACKAGES)


@functools.lru_cache(maxsize=4096)
def is_in_library(file: str) -> bool:
    """Whether a file of code belongs to torch, Triton, pygraph or the standard library.

    >>> is_in_library(torch.nn.__file__), is_in_library("train.py")
    (True, False)
    """
    return file.startswith(_LIBRARIES) or is_in_standard_library(file)


@contextlib.contextmanager
def attributed_to(line: str | None) -> Generator[None, None, None]:
    """Attribute operations to this line while code runs that was generated from the user's."""
    token = _attributed.set(line)
    try:
        yield
    finally:
        _attributed.reset(token)


def line_in(stack: str | None) -> str | None:
    """The innermost line outside of libraries in the text of a stack, as the nodes of Dynamo's graphs have it.

    >>> line_in('  File "src/train.py", line 41, in step')
    'train.py:41'
    """
    found: list[tuple[str, str]] = re.findall(r'File "([^"]+)", line (\d+)', stack or "")
    lines = [(name, int(number)) for name, number in found if not is_in_library(name)]
    return _line(*lines[-1]) if lines else None


def user_frame(frame: FrameType | None) -> str | None:
    """The innermost line outside of libraries, as ``file.py:41``."""
    if (line := _attributed.get()) is not None:
        return line
    found = frame_outside(frame)
    return None if found is None else _line(found.f_code.co_filename, found.f_lineno)


def _line(file: str, number: int) -> str:
    line = f"{os.path.basename(file)}:{number}"
    if _files.setdefault(line, file) != file:
        _files[line] = None
    return line


def text_of(line: str | None) -> str:
    """The code on a line that `user_frame` or `line_in` has named; empty if it is not known."""
    file = _files.get(line or "")
    return "" if file is None else linecache.getline(file, int(str(line).rpartition(":")[2])).strip()


def frame_outside(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside of libraries, from this one on; None if there is none in its thread."""
    while frame is not None and is_in_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line(error: BaseException) -> str | None:
    """The innermost line outside of libraries in an error's traceback."""
    line: str | None = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if not is_in_library(frame.f_code.co_filename):
            line = _line(frame.f_code.co_filename, number)
    return line


def user_lines(error: BaseException) -> list[str]:
    """The lines outside of libraries in an error's traceback, as Python prints them."""
    frames = [summary for summary in traceback.extract_tb(error.__traceback__) if not is_in_library(summary.filename)]
    return traceback.format_list(frames)


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "no message").rstrip(".")
