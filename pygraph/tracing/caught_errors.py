"""Errors that only a trace raises, and that the function has caught: what it does then is not what eager does."""

# Symbols are torch's private parts. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
from __future__ import annotations

import builtins
import re
import struct
from collections.abc import Callable, Iterable
from typing import Any

import sympy  # pyright: ignore[reportMissingTypeStubs]
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from pygraph.errors import TraceError
from pygraph.ir.source_lines import is_in_library
from pygraph.tracing.own_errors import is_raised_by_user, names_a_class_of_the_trace
from pygraph.tracing.torch_errors import in_words, is_of_a_trace


class Symbols(ShapeEnv):
    """The numbers of a trace, which asks for those that are on the device, and notes errors about them.

    Attributes:
        raised: The errors.
        answer: Given an expression, returns what it is when the numbers in it are known; None if they stay unknown.
        known: The floats of the device that were asked for, by symbol.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.raised: list[BaseException] = []
        self.answer: Callable[[Any], Any] | None = None
        self.known: dict[Any, Any] = {}

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """The value of an expression; a number of the device that it needs is asked for."""
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            known = None if self.answer is None else self.answer(orig_expr)
            if known is None:
                raise
            self.raised.remove(error)
            error.__traceback__ = None
        return super().evaluate_expr(known, *args, **kwargs)

    def if_known(self, truth: Callable[[], bool]) -> bool | None:
        """The outcome of a condition if it is known without the numbers of the device; else None."""
        answer, self.answer = self.answer, None
        try:
            return truth()
        except GuardOnDataDependentSymNode as error:
            self.raised.remove(error)
            error.__traceback__ = None
            return None
        finally:
            self.answer = answer

    def fix(self, symbol: Any, number: int) -> None:
        """Have a symbol stand for a number from now on."""
        self.size_like.discard(symbol)  # else 0 and 1 would stay symbols, as sizes of which torch says nothing
        self._set_replacement(symbol, sympy.Integer(number), "asked for")
        if not self.replace(symbol).is_number:
            raise TraceError(f"a number of the device is {number}, outside of the range that it was described with")

    def _make_data_dependent_error(self, *args: Any, **kwargs: Any) -> Any:
        error: BaseException = super()._make_data_dependent_error(*args, **kwargs)
        self.raised.append(error)
        return error


def caught_by_function(errors: Iterable[BaseException], *, has_numbers: bool) -> str | None:
    """The first error that only a trace raises and that user code has caught, in words; None if there is none.

    A traceback begins at the frame that has caught the error. Torch catches some of its own.

    Args:
        errors: The errors.
        has_numbers: Whether the trace has numbers that it does not know.
    """
    for error in errors:
        caught = error.__traceback__
        file = "" if caught is None else caught.tb_frame.f_code.co_filename
        if not file or is_in_library(file):
            continue
        may_be_of_a_number = has_numbers and not _INSTALLED.search(file) and _is_of_a_number(error)
        if is_of_a_trace(error) or names_a_class_of_the_trace(error) or may_be_of_a_number:
            return f"{in_words(error)[0]}, and it catches the error, which is none in eager"
    return None


_INSTALLED = re.compile(r"^<|[/\\](site|dist)-packages[/\\]")
"""Files of code that was generated or installed, which tries what it may be given (sympy, einops)."""


def _is_of_a_number(error: BaseException) -> bool:
    """Whether an error may be one of code that takes numbers of Python's alone, and is given another one.

    Not if it says of which classes the objects are that it is about, and all of them are Python's.
    """
    if not isinstance(error, (TypeError, struct.error)) or is_raised_by_user(error):
        return False
    about = _ABOUT.match(str(error))
    named = () if about is None else [name for name in about.groups() if name is not None]
    return not named or not all(name == "NoneType" or hasattr(builtins, name) for name in named)


_ABOUT = re.compile(r"'(\w+)' object |object of type '(\w+)'|unsupported operand type\(s\) for .*: '(\w+)' and '(\w+)'")
"""The begin of messages of CPython 3.11 to 3.14 that name the classes of the objects that an error is about."""
