"""Errors of a traced function: freed of the frames that hold its tensors and guards of torch's dispatcher."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import ast
import contextlib
import itertools
import threading
import traceback
from collections.abc import Generator
from types import FunctionType, TracebackType
from typing import Any

import torch

from pygraph.errors import TraceError
from pygraph.ir.source_lines import PYGRAPH_FOLDER, is_in_library, user_lines


@contextlib.contextmanager
def preserved_dispatch_state() -> Generator[None, None, None]:
    """Free errors that leave this block of guards of torch's dispatcher in their frames, which would undo later guards.

    Torch has such guards in the variables of functions. Private; checked with torch 2.11 and 2.13.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        try:
            yield
        except BaseException as error:
            _clear_frames(error)
            raise


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error; the tracebacks of its causes, whose functions hold more, become a note.

    Of an error of the user's function, and of its causes, the frames of user code stay, without their variables.
    """
    is_own = isinstance(error, TraceError) and error.raised is not None
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            chain += [link.__cause__, link.__context__]
            if link is error:
                continue
            if is_own:
                link.__traceback__ = in_user_code(link.__traceback__)
                continue
            lines = user_lines(link)
            if lines:
                link.add_note("In the function that was traced:\n" + "".join(lines).rstrip())
            link.__traceback__ = None


def in_user_code(entry: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback outside of torch, Triton, pygraph and the standard library, without what they hold.

    A frame refers to its function and to the frame that has called it, and these to tensors of the trace, even when it
    is cleared. So each is a new one, of a function that fails in the same file and line and has the same name.
    """
    users = [one for one in entries_of(entry) if not is_in_library(one.tb_frame.f_code.co_filename)]
    failed: list[TracebackType] = []
    # Called in a thread of its own, the functions' frames lead to none of the trace.
    calls = threading.Thread(target=_call_each, args=([_like(one) for one in users], failed))
    try:
        calls.start()
    except RuntimeError:  # no thread can be started: no frames
        return None
    calls.join()
    kept: TracebackType | None = None
    for one, new in reversed(list(zip(users, failed, strict=True))):
        kept = TracebackType(kept, new.tb_frame, new.tb_lasti, _line_of(one))
    return kept


def without_ours(entry: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of pygraph that lead to user code; as it is if there is no frame of user code."""
    entries = entries_of(entry)
    users = [index for index, one in enumerate(entries) if not is_in_library(one.tb_frame.f_code.co_filename)]
    if not users:
        return entry
    kept: TracebackType | None = None
    for index, one in reversed(list(enumerate(entries))):
        if index > users[-1] or not one.tb_frame.f_code.co_filename.startswith(PYGRAPH_FOLDER):
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, _line_of(one))
    return kept


def entries_of(entry: TracebackType | None) -> list[TracebackType]:
    """The entries of a traceback, the outermost first."""
    entries: list[TracebackType] = []
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries


def _line_of(entry: TracebackType) -> int:
    """The line of an entry; -1 where a signal's handler has raised at an instruction that belongs to none."""
    line: Any = entry.tb_lineno
    return -1 if line is None else line


def _like(entry: TracebackType) -> FunctionType:
    """A function that fails when it is called, with a frame that looks like that of an entry where it is printed."""
    code, namespace = entry.tb_frame.f_code, entry.tb_frame.f_globals
    position = next(itertools.islice(code.co_positions(), entry.tb_lasti // 2, None))
    line, end, column, end_column = position
    line = line or max(_line_of(entry), 1)
    at: dict[str, Any] = {"lineno": line, "end_lineno": end or line}
    at |= {"col_offset": column or 0, "end_col_offset": end_column or 0}
    fails = ast.Raise(exc=ast.Name(_ERROR, ast.Load(), **at), cause=None, **at)
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    function = ast.FunctionDef(name=_ERROR, args=nothing, body=[fails], decorator_list=[], **at)
    found: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), code.co_filename, "exec"), found)
    made = found[_ERROR].__code__.replace(co_name=code.co_name, co_qualname=code.co_qualname)
    known = {name: namespace[name] for name in ("__name__", "__file__", "__loader__", "__spec__") if name in namespace}
    return FunctionType(made, {**known, _ERROR: Exception})


def _call_each(functions: list[FunctionType], failed: list[TracebackType]) -> None:
    for function in functions:
        try:
            function()
        except Exception as error:
            failed.append(entries_of(error.__traceback__)[1])  # behind that of this function


_ERROR = "error"
