"""Live numbers: symbols for numbers, which user code takes for numbers of the type that the caller passed.

While a function is traced, a live number is a ``torch.SymFloat`` or ``torch.SymInt``, so ``isinstance(k, float)`` would
be false where it is true in eager. But Python also looks at ``k.__class__``, which to user code is the type of the
caller's number. A number whose text is asked for, or an attribute that a symbol has not (``k.dtype``, ``k.hex()``), is
baked in. ``type(k)`` cannot be noticed.

A live number has the value that it has in this call, and what it is made of (`Source`): so what code decides by it is
known outside of the function, too. `pygraph.tracing.number_operations` has its operators.
"""

# Symbols have no types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Generator
from typing import Any, NoReturn

import torch

from pygraph.errors import TraceError
from pygraph.tracing.number_uses import NumberUses
from pygraph.tracing.patches import replaced
from pygraph.tracing.user_frames import called_by_user, type_questions


@dataclasses.dataclass(frozen=True)
class Source:
    """The numbers and operations that a number of a trace is made of.

    Attributes:
        text: The number in Python, made of ``n0`` for the first leaf of the arguments and so on.
        value: The number in this call.
        leaves: The leaves of the traced arguments that it is made of.
        is_passed: Whether it is one of these.
    """

    text: str
    value: Any
    leaves: frozenset[int]
    is_passed: bool = False


class Live:
    """The common part of `LiveFloat`, `LiveInt` and `LiveBool`.

    Args:
        node: The symbol.
        source: What the number is made of; None for one that was read from a tensor.
        uses: Gets what user code asks of the number that a symbol does not know.
        is_of_host: Whether it is made of numbers of the host alone, as of a tensor there.

    Attributes:
        source: What the number is made of.
        uses: What is asked of the numbers of the trace.
        is_of_host: Whether a run can compute it before the device does anything.
        kind_of_device: The type of such numbers in Python, where they are read from a tensor.
    """

    kind_of_device: type

    def __init__(self, node: Any, source: Source | None, uses: NumberUses, *, is_of_host: bool = True) -> None:
        super().__init__(node)  # pyright: ignore  # of torch's class, which comes next
        self.source = source
        self.uses = uses
        self.is_of_host = is_of_host

    @property
    def kind(self) -> type:
        """The type that the number has in eager, whoever asks."""
        if self.source is not None:
            return self.source.value.__class__
        return self.kind_of_device

    @property
    def __class__(self) -> type:  # pyright: ignore
        """The type that the number has in eager to user code; the symbol's to other code."""
        return self.kind if called_by_user(2, type_questions) else type(self)

    def known_value(self) -> Any:
        """The number, on which the trace depends from now on; of one that was read from a tensor, if it is known."""
        source = self.source
        if source is None:
            return int(self) if isinstance(self, torch.SymInt) else float(self)  # pyright: ignore
        if source.is_passed:
            self.uses.asked |= source.leaves
            return source.value
        return self.uses.decide(source.text, source.value, source.leaves)

    def _decided(self, name: str, function: Callable[[Any], Any]) -> Any:
        """The result of one of Python's own functions, which cannot be live."""
        source = self.source
        if source is None:
            return getattr(super(), f"__{name}__")()
        value = self.uses.result(f"{name}({source.text})", source.leaves, lambda: function(source.value))
        if source.is_passed and type(value) is not bool and value == source.value:
            self.known_value()
            return value
        text = source.text if name == "index" else f"{name}({source.text})"
        return self.uses.decide(text, value, source.leaves)

    def __bool__(self) -> bool:
        return self._decided("bool", bool)

    def __int__(self) -> int:
        return self._decided("int", int)

    def __float__(self) -> float:
        return self._decided("float", float)

    def _shown(self) -> tuple[Any, ...]:
        """The number itself for code of the user's that asks for its text: a warning with it is shown at once."""
        if not called_by_user(3, None):
            return ()
        if self.source is None and not isinstance(self, torch.SymInt):  # of which each call has another
            _refuse_text(self)
        known: Any = self.known_value()
        return (known,)

    def __getattr__(self, name: str) -> Any:
        source = self.__dict__.get("source")
        if source is None or not hasattr(source.value, name) or not called_by_user(2, None):
            raise AttributeError(f"{self.kind.__name__!r} object has no attribute {name!r}")
        return getattr(self.known_value(), name)

    def __dir__(self) -> list[str]:
        if self.source is None or not called_by_user(2, None):
            return list(super().__dir__())
        return dir(self.source.value)

    def __copy__(self) -> Any:
        return self  # numbers are never copied

    def __deepcopy__(self, memo: Any) -> Any:
        del memo
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.known_value().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        shown = self._shown()
        return repr(shown[0]) if shown else super().__repr__()

    def __str__(self) -> str:
        shown = self._shown()
        return str(shown[0]) if shown else super().__str__()

    def __format__(self, spec: str) -> str:
        shown = self._shown()
        return format(shown[0], spec) if shown else super().__format__(spec)


def _refuse_text(number: Any) -> NoReturn:
    error = TraceError("it asks for the text of a number that is computed on the device")
    number.node.shape_env.raised.append(error)
    raise error


class LiveFloat(Live, torch.SymFloat):
    """A float, or a NumPy number of that kind."""

    kind_of_device = float


class LiveInt(Live, torch.SymInt):
    """An int, or a NumPy number of that kind."""

    kind_of_device = int

    def __index__(self) -> int:  # which floats do not have
        return self._decided("index", operator.index)


class LiveBool(Live, torch.SymBool):
    """The outcome of a comparison of numbers."""

    kind_of_device = bool


def argument_number(symbol: torch.SymInt | torch.SymFloat, value: Any, leaf: int, uses: NumberUses) -> Any:
    """A live number for a symbol.

    Args:
        symbol: The symbol.
        value: The caller's number.
        leaf: Its leaf among the arguments.
        uses: Gets what user code asks of it.
    """
    node: Any = symbol.node  # pyright: ignore
    source = Source(f"n{leaf}", value, frozenset({leaf}), is_passed=True)
    uses.add_symbol(node.expr, source.text, source.leaves)
    return (LiveInt if isinstance(symbol, torch.SymInt) else LiveFloat)(node, source, uses)


def known_value(number: Any) -> Any:
    """The value of a symbol; the trace depends on it from now on."""
    if isinstance(number, Live):
        return number.known_value()
    if isinstance(number, torch.SymBool):
        return bool(number)
    return int(number) if isinstance(number, torch.SymInt) else float(number)


def computed_number(number: Any, *, is_of_host: bool) -> Any:
    """A live number for a symbol that was read from a tensor, of the type that it has in eager; others as they are.

    Args:
        number: The symbol.
        is_of_host: Whether it is made of numbers of the host alone.
    """
    live = _LIVE.get(type(number))  # pyright: ignore[reportUnknownArgumentType]
    return number if live is None else live(number.node, None, NumberUses(), is_of_host=is_of_host)


_LIVE: dict[type, Any] = {torch.SymInt: LiveInt, torch.SymFloat: LiveFloat, torch.SymBool: LiveBool}


@contextlib.contextmanager
def texts_noticed(uses: NumberUses) -> Generator[None, None, None]:
    """Notice that user code asks for the text of a number that was computed from others.

    Args:
        uses: Knows the numbers that were passed; gets the leaves that a text is computed from.
    """
    owner = threading.get_ident()

    def noticing(text: Callable[[Any], str]) -> Callable[[Any], str]:
        @functools.wraps(text)
        def noticed(self: Any) -> str:
            if threading.get_ident() == owner and called_by_user(2, None):
                free = self.node.expr.free_symbols
                if not free <= uses.leaves.keys():
                    _refuse_text(self)
                uses.asked |= uses.leaves_of(free)
            return text(self)

        return noticed

    kinds: tuple[Any, ...] = (torch.SymFloat, torch.SymInt, torch.SymBool)
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(replaced(kind, "__repr__", noticing))
        yield
