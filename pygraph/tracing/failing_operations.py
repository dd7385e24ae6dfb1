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
_CATCHING = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT")


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
        if not is_in_library(frame.f_code.co_filename) and _may_catch(frame.f_code, frame.f_lasti):
            raise TraceError(f"it may catch an error of {func}, which depends on data")
        frame = frame.f_back


@functools.lru_cache(maxsize=1024)
def _may_catch(code: types.CodeType, position: int) -> bool:
    """Whether code has an ``except`` around an instruction; ``with`` and ``finally`` pass errors on."""
    entries: Any = dis._parse_exception_table(code)  # pyright: ignore  # private
    targets = {entry.target for entry in entries if entry.start <= position < entry.end}
    return any(_catches(code, target) for target in targets)


def _catches(code: types.CodeType, target: int) -> bool:
    """Whether the handler that begins there catches errors."""
    for instruction in dis.get_instructions(code):
        if instruction.offset < target:
            continue
        if instruction.opname in _CATCHING:
            return True
        if instruction.opname in ("RERAISE", "WITH_EXCEPT_START"):
            return False
    return False
