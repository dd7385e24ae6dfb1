"""Operations that fail by their data where the function may catch the error: what happens then is no part of a trace.

    try:
        factor = torch.linalg.cholesky(matrix)
    except torch.linalg.LinAlgError:
        factor = torch.linalg.cholesky(matrix + jitter)

On the fakes of a trace nothing fails. A replay would raise the error where no code of the function's can catch it.

Where the caller catches it, what the function has left behind until then is to be there: counters, gradients, items of
lists. A replay stores these when a call has ended. So in the trace of a function that leaves something behind, an
`ask` stands behind such an operation. What the call updates comes after that, and a call that fails before has done
nothing, and runs as it is.
"""

# Operations have no types. The exception table is read as ``dis`` does, by a private function of Python 3.11 to 3.14.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import dis
import functools
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError
from pygraph.ir.decisions import NO_QUESTION, ask
from pygraph.ir.effects import fails
from pygraph.ir.source_lines import is_in_library

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
    # Draws fail on the device, where no one can catch that, but not on every one.
    is_draw = func.overloadpacket.__name__ in ("multinomial", "repeat_interleave")
    if not is_draw and not fails(func, kwargs, on_host=False):
        return
    while frame is not None and frame.f_code.co_filename != _TRACER:
        if not is_in_library(frame.f_code.co_filename) and _may_catch(frame):
            raise TraceError(f"it may catch an error of {func}, which depends on data")
        frame = frame.f_back


def note_failures() -> None:
    """Have the trace under way, if any, ask behind operations that fail by their data whether they have not."""
    mode: Any = get_proxy_mode()
    if mode is not None:
        setattr(mode.tracer, _NOTES, True)


def ask_behind(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tracer: Any) -> None:
    """Record that what follows is done only where an operation has not failed, if that is to be noted.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        tracer: The tracer of the trace under way.
    """
    if not getattr(tracer, _NOTES, False) or not isinstance(func, torch._ops.OpOverload):  # pyright: ignore
        return
    if not fails(func, kwargs, on_host=True) and not fails(func, kwargs, on_host=False):
        return
    tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    if fails(func, kwargs, on_host=bool(tensors) and tensors[0].is_cpu):
        tracer.create_proxy("call_function", ask(), (True, True, NO_QUESTION), {})


_NOTES = "_pygraph_notes_failures"  # the attribute of a tracer


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
