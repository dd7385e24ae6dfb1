"""Operations that fail by their data where the function may catch the error: what happens then is no part of a trace.

    try:
        factor = torch.linalg.cholesky(matrix)
    except torch.linalg.LinAlgError:
        factor = torch.linalg.cholesky(matrix + jitter)

On the fakes of a trace nothing fails. A replay would raise the error where no code of the function's can catch it.
"""

# Operations have no types. The exception table is read as ``dis`` does, by a private function of Python 3.11 to 3.14.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import dis
import functools
import os
import types
from typing import Any

import torch

from pygraph.errors import TraceError
from pygraph.ir.source_lines import is_in_library

# The operations of aten that look at results on the host and raise; others fail on the device, which no one can catch.
_FAILING = frozenset({
    "_linalg_check_errors", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "linalg_eigvals", "_linalg_svd",
    "linalg_lstsq", "linalg_cholesky", "linalg_inv", "linalg_solve", "cholesky", "inverse", "multinomial", "bincount",
    "repeat_interleave",
})  # fmt: skip
# Behind its frames are those of the caller, in which a replay raises errors as well.
_TRACER = os.path.join(os.path.dirname(__file__), "recording.py")
# Instructions before an error is compared with a class: those that read the class, and those that do not matter.
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")
_SILENT = ("PUSH_EXC_INFO", "BUILD_TUPLE", "CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "RESUME", "NOT_TAKEN")


def check_not_caught(func: Any, kwargs: dict[str, Any], frame: types.FrameType | None) -> None:
    """Refuse an operation that fails by its data, if a function that calls it may catch the error.

    Args:
        func: The operation.
        kwargs: Its keyword arguments.
        frame: The frame that calls it.

    Raises:
        TraceError: It is so.
    """
    if not isinstance(func, torch._ops.OpOverload):  # pyright: ignore[reportPrivateUsage]  # torch 2.11 and 2.13
        return
    name = func.overloadpacket.__name__
    if name not in _FAILING and not kwargs.get("check_errors"):
        return
    while frame is not None and frame.f_code.co_filename != _TRACER:
        if not is_in_library(frame.f_code.co_filename) and _may_catch(frame):
            raise TraceError(f"it may catch an error of {func}, which depends on data")
        frame = frame.f_back


def _may_catch(frame: types.FrameType) -> bool:
    """Whether a frame has an ``except`` around what it calls that catches errors of torch, and not some class alone."""
    return any(path is None or _is_raised(_looked_up(path, frame)) for path in _caught(frame.f_code, frame.f_lasti))


def _is_raised(caught: Any) -> bool:
    """Whether an error of torch may be of what an ``except`` names."""
    if not isinstance(caught, type):
        return True
    return caught.__module__.partition(".")[0] in ("builtins", "torch", "numpy")


def _looked_up(path: tuple[str, ...], frame: types.FrameType) -> Any:
    """The value that names stand for in a frame, of a variable and attributes; None if that is unknown."""
    value = {**frame.f_builtins, **frame.f_globals, **frame.f_locals}.get(path[0])
    for name in path[1:]:
        value = getattr(value, name, None)
    return value


@functools.lru_cache(maxsize=1024)
def _caught(code: types.CodeType, position: int) -> tuple[tuple[str, ...] | None, ...]:
    """The names of what is caught around an instruction; None for anything. ``with`` and ``finally`` pass errors on."""
    entries: Any = dis._parse_exception_table(code)  # pyright: ignore  # private
    targets = {entry.target for entry in entries if entry.start <= position < entry.end}
    return tuple(path for target in sorted(targets) for path in _caught_by(code, target))


def _caught_by(code: types.CodeType, target: int) -> list[tuple[str, ...] | None]:
    """The names of what the handler that begins there catches, in the order of its clauses."""
    found: list[tuple[str, ...] | None] = []
    named: list[tuple[str, ...] | None] = []
    begin, is_checked = target, False
    for instruction in dis.get_instructions(code):
        if instruction.offset < begin:
            continue
        operation, name = instruction.opname, instruction.argval
        if operation == "CHECK_EXC_MATCH":
            found += named or [None]
            named, is_checked = [], True
        elif is_checked:  # the jump to the next clause
            if not isinstance(name, int):
                return [*found, None]
            begin, is_checked = name, False
        elif operation in ("POP_EXCEPT", "CHECK_EG_MATCH"):
            return [*found, None]
        elif operation in ("RERAISE", "WITH_EXCEPT_START"):
            return found
        elif operation == "LOAD_ATTR" and named and named[-1] is not None:
            named[-1] += (name,)
        elif operation.startswith(_LOADS) and isinstance(name, str):
            named.append((name,))
        elif operation not in _SILENT:
            named = [None]
    return found
