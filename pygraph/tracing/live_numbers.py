"""Symbols for numbers that pass for what they stand for when the function asks what type they are.

While it is traced, a live number is a ``torch.SymFloat`` or ``torch.SymInt``, so ``isinstance(k, float)`` would be
false where eager says true. Python looks at ``k.__class__`` before it says so; to code that is not torch's, that is the
type of what the caller passed. A number whose text is asked for, or an attribute that a symbol has not (``k.dtype``,
``k.hex()``), is baked in. ``type(k)`` cannot be noticed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import torch

from pygraph.errors import TraceError
from pygraph.tracing.patches import replaced
from pygraph.tracing.user_frames import called_by_user, type_questions


class _Live:
    """What both have.

    Args:
        node: The symbol.
        kind: The type of what the caller passed.
        passed: What the caller passed, and its position among the arguments' leaves; None if it was computed.
        asked: Gets that position when user code asks for more than a symbol knows.
    """

    def __init__(self, node: Any, kind: type, passed: tuple[Any, int] | None, asked: set[int]) -> None:
        super().__init__(node)  # pyright: ignore  # of torch's class, which comes next
        self._kind = kind
        self._passed = passed
        self._asked = asked

    @property
    def kind(self) -> type:
        """The type of what the caller passed, whoever asks."""
        return self._kind

    @property
    def __class__(self) -> type:  # pyright: ignore
        """What user code is told, which is as in eager."""
        return self._kind if called_by_user(2, type_questions) else type(self)

    def known_value(self) -> Any:
        """What the caller passed, on which the trace depends from now on; a computed number if it is known."""
        if self._passed is None:
            return int(self) if isinstance(self, torch.SymInt) else float(self)  # pyright: ignore
        value, leaf = self._passed
        self._asked.add(leaf)
        return value

    def _note(self) -> None:
        if called_by_user(3, None):
            if self._passed is None:
                raise TraceError(_NO_TEXT)
            self.known_value()

    def __getattr__(self, name: str) -> Any:
        passed = self.__dict__.get("_passed")
        if passed is None or not hasattr(passed[0], name) or not called_by_user(2, None):
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {name!r}")
        return getattr(self.known_value(), name)

    def __dir__(self) -> list[str]:
        if self._passed is None or not called_by_user(2, None):
            return list(super().__dir__())
        return dir(self._passed[0])

    def __copy__(self) -> Any:
        return self  # numbers are never copied

    def __deepcopy__(self, memo: Any) -> Any:
        del memo
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.known_value().__reduce_ex__(protocol)

    def __round__(self, ndigits: int | None = None) -> Any:
        if issubclass(self._kind, np.generic):  # which is no NumPy number any more
            return round(self.known_value(), ndigits)
        return super().__round__(ndigits) if ndigits is not None else super().__round__()  # pyright: ignore

    def __repr__(self) -> str:
        self._note()
        return super().__repr__()

    def __str__(self) -> str:
        self._note()
        return super().__str__()

    def __format__(self, spec: str) -> str:
        self._note()
        return super().__format__(spec)


_NO_TEXT = "it asks for the text of a number that is computed on the device"


class LiveFloat(_Live, torch.SymFloat):
    """A float argument."""


class LiveInt(_Live, torch.SymInt):
    """An int argument."""


def known_value(number: Any) -> Any:
    """What a symbol stands for; the trace depends on it from now on."""
    if isinstance(number, _Live):
        return number.known_value()
    if isinstance(number, torch.SymBool):
        return bool(number)
    return int(number) if isinstance(number, torch.SymInt) else float(number)


def computed_number(number: torch.SymFloat | torch.SymInt) -> torch.SymFloat | torch.SymInt:
    """A number that was read from a tensor, which has the type that it has in eager."""
    node: Any = number.node  # pyright: ignore
    return LiveInt(node, int, None, set()) if isinstance(number, torch.SymInt) else LiveFloat(node, float, None, set())


@contextlib.contextmanager
def texts_noticed(symbols: Mapping[Any, int], asked: set[int]) -> Generator[None, None, None]:
    """Notice that user code asks for the text of a number that was computed from others.

    Args:
        symbols: The leaves of the numbers that were passed.
        asked: Gets the leaves that a text is computed from.
    """
    owner = threading.get_ident()

    def noticing(text: Callable[[Any], str]) -> Callable[[Any], str]:
        @functools.wraps(text)
        def noticed(self: Any) -> str:
            if threading.get_ident() == owner and called_by_user(2, None):
                free = self.node.expr.free_symbols
                if not free <= symbols.keys():
                    raise TraceError(_NO_TEXT)
                asked.update(symbols[symbol] for symbol in free)
            return text(self)

        return noticed

    kinds: tuple[Any, ...] = (torch.SymFloat, torch.SymInt, torch.SymBool)
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(replaced(kind, "__repr__", noticing))
        yield
