"""Live numbers: symbols for numbers, which user code takes for numbers of the type that the caller passed.

While a function is traced, a live number is a ``torch.SymFloat`` or ``torch.SymInt``, so ``isinstance(k, float)`` would
be false where it is true in eager. But Python also looks at ``k.__class__``, which to user code is the type of the
caller's number. A number whose text is asked for, or an attribute that a symbol has not (``k.dtype``, ``k.hex()``), is
baked in. ``type(k)`` cannot be noticed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from pygraph.errors import TraceError
from pygraph.tracing.patches import replaced
from pygraph.tracing.user_frames import called_by_user, type_questions


class _Live:
    """The common part of `LiveFloat` and `LiveInt`.

    Args:
        node: The symbol.
        kind: The type of the caller's number.
        argument: The caller's number and its leaf among the arguments; None if the number was computed.
        asked: Gets that leaf when user code asks for more than a symbol knows.
    """

    def __init__(self, node: Any, kind: type, argument: tuple[Any, int] | None, asked: set[int]) -> None:
        super().__init__(node)  # pyright: ignore  # of torch's class, which comes next
        self._kind = kind
        self._argument = argument
        self._asked = asked

    @property
    def kind(self) -> type:
        """The type of the caller's number, whoever asks."""
        return self._kind

    @property
    def __class__(self) -> type:  # pyright: ignore
        """The type of the caller's number to user code, as in eager; the symbol's to other code."""
        return self._kind if called_by_user(2, type_questions) else type(self)

    def known_value(self) -> Any:
        """The caller's number, on which the trace depends from now on; a computed number's value, if it is known."""
        if self._argument is None:
            return int(self) if isinstance(self, torch.SymInt) else float(self)  # pyright: ignore
        value, leaf = self._argument
        self._asked.add(leaf)
        return value

    def _note(self) -> None:
        if called_by_user(3, None):
            if self._argument is None:
                _refuse_text(self)
            self.known_value()

    def __getattr__(self, name: str) -> Any:
        argument = self.__dict__.get("_argument")
        if argument is None or not hasattr(argument[0], name) or not called_by_user(2, None):
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {name!r}")
        return getattr(self.known_value(), name)

    def __dir__(self) -> list[str]:
        if self._argument is None or not called_by_user(2, None):
            return list(super().__dir__())
        return dir(self._argument[0])

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


def _refuse_text(number: Any) -> NoReturn:
    error = TraceError("it asks for the text of a number that is computed on the device")
    number.node.shape_env.raised.append(error)
    raise error


class LiveFloat(_Live, torch.SymFloat):
    """A float argument."""


class LiveInt(_Live, torch.SymInt):
    """An int argument."""


def known_value(number: Any) -> Any:
    """The value of a symbol; the trace depends on it from now on."""
    if isinstance(number, _Live):
        return number.known_value()
    if isinstance(number, torch.SymBool):
        return bool(number)
    return int(number) if isinstance(number, torch.SymInt) else float(number)


def computed_number(number: torch.SymFloat | torch.SymInt) -> torch.SymFloat | torch.SymInt:
    """A live number for a symbol that was read from a tensor, of the type that it has in eager."""
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
                    _refuse_text(self)
                asked.update(symbols[symbol] for symbol in free)
            return text(self)

        return noticed

    kinds: tuple[Any, ...] = (torch.SymFloat, torch.SymInt, torch.SymBool)
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(replaced(kind, "__repr__", noticing))
        yield
