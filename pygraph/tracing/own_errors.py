"""Errors of a function that is traced: those that its own code raises, as it would in eager.

All others are of torch's operations, or of what tracing cannot do.
"""

from __future__ import annotations

import dis
import os
import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.errors import PygraphError
from pygraph.ir.source_lines import PYGRAPH_FOLDER, TORCH_FOLDER, is_in_library, is_in_standard_library
from pygraph.tracing.error_frames import entries_of
from pygraph.tracing.torch_errors import translation

_MODULES = tuple(os.path.join(TORCH_FOLDER, "nn", "modules", name) for name in ("module.py", "container.py"))
"""Code that looks up attributes and items for the user, and calls ``forward``. Checked with torch 2.11 and 2.13."""

_WRONG_CALL = re.compile(
    r"\(\) (got an unexpected keyword argument|got multiple values for|got some positional-only|missing \d+ required"
    r"|takes (from )?\d+ .*positional argument)"
)
"""Python's words for a call that does not fit a signature, 3.11 to 3.14."""

_OF_THE_TRACE = re.compile(r"\b(FakeTensor|FunctionalTensor|(Sym|Live)(Int|Float|Bool))\b")


def is_own_error(failure: Exception) -> bool:
    """Whether a function that was traced has failed as it would in eager.

    >>> def fails():
    ...     raise ValueError("no")
    >>> try:
    ...     fails()
    ... except ValueError as error:
    ...     is_own_error(error)
    True
    """
    if any(isinstance(link, PygraphError) or translation(link) is not None for link in _chain(failure)):
        return False
    if names_a_class_of_the_trace(failure):
        return False
    entries = entries_of(failure.__traceback__)
    files = [one.tb_frame.f_code.co_filename for one in entries]
    innermost = next((file for file in reversed(files) if not _works_for_others(file)), "")
    if innermost.startswith(PYGRAPH_FOLDER):  # which calls the function
        return isinstance(failure, TypeError) and _WRONG_CALL.search(str(failure)) is not None
    if is_in_library(innermost):
        return False
    # From C without a frame, it may be of an extension that does not know the tensors of a trace.
    return not isinstance(failure, RuntimeError) or _raises(entries[-1])


def names_a_class_of_the_trace(failure: BaseException) -> bool:
    """Whether an error is about a tensor or a number of a trace, by its words or by what it holds."""
    held = pytree.tree_leaves([failure.args, vars(failure)])
    return bool(_OF_THE_TRACE.search(str(failure))) or any(map(_is_of_the_trace, held))


def is_raised_by_user(failure: BaseException) -> bool:
    """Whether a statement of the user's code has raised an error."""
    entries = entries_of(failure.__traceback__)
    return bool(entries) and not is_in_library(entries[-1].tb_frame.f_code.co_filename) and _raises(entries[-1])


def _is_of_the_trace(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _works_for_others(file: str) -> bool:
    """Whether code of this file fails for what the code that calls it has done."""
    return is_in_standard_library(file) or file in _MODULES


def _chain(failure: BaseException) -> Iterator[BaseException]:
    """The error, those that it was raised from, and those that were being handled then."""
    seen: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [failure]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen[id(link)] = link
            waiting += [link.__cause__, link.__context__]
    yield from seen.values()


def _raises(entry: TracebackType) -> bool:
    """Whether it is a statement of Python's that raises there."""
    code = entry.tb_frame.f_code.co_code
    return dis.opname[code[entry.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")
