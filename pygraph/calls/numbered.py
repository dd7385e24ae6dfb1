"""Calls of a function whose numbers change: what it asks of them is computed before the call.

A number by which a function decides is baked in at first. With its second value, calls are those of a `NumberFunction`,
which is passed the outcomes of comparisons and the numbers that the function computes on the host: it has a trace for
each path, and not one for each number.
"""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pygraph.calls.engine import Engine
from pygraph.calls.number_function import NumberFunction, computer_of
from pygraph.calls.policy import Policy
from pygraph.calls.retries import Traces
from pygraph.ir.descriptors import Fallback
from pygraph.ir.paths import argument_path, flatten_with_path
from pygraph.tracing.number_uses import MissingNumbersError, NumberUse

_SUBSCRIPTS = re.compile(r"(args|kwargs)(\[\d+\]|\['\w+'\])*")


def can_be_computed(uses: Sequence[NumberUse], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what a function asks of numbers can be computed of its arguments: none is inside an object."""
    paths = _paths(args, kwargs)
    return all(_SUBSCRIPTS.fullmatch(paths[leaf]) for use in uses for leaf in use.leaves())


def _paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    return [argument_path(path) for path, _ in flatten_with_path((args, kwargs))[0]]


class NumberedCalls:
    """Runs calls of one kind whose numbers change.

    Args:
        function: The function.
        args: The arguments of a call.
        kwargs: Its keyword arguments.
        uses: What it asks of numbers.
        policy: The rules of the function that is passed that.

    Attributes:
        engine: The engine of that function.
        traces: The budget of traces of such calls.
    """

    def __init__(
        self, function: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], uses: Sequence[NumberUse], policy: Policy
    ) -> None:
        self._paths = _paths(args, kwargs)
        self._numbers = NumberFunction(function.fn, function.name, self._paths)
        self._lock = function.shared.lock
        self._compute: Callable[..., list[Any]]
        self._give(uses)
        self.engine = function.derive(self._numbers, policy)
        self.traces: Traces | None = None

    def _give(self, uses: Sequence[NumberUse]) -> None:
        """Have the function be passed more of what it asks for."""
        numbers = self._numbers
        numbers.uses = (*numbers.uses, *numbers.wanted(uses))
        self._compute = computer_of(numbers.uses, self._paths)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call."""
        while True:
            try:
                return self.engine(self._compute(args, kwargs), args, kwargs)
            except MissingNumbersError as error:
                missing = [use for use in error.uses if can_be_computed([use], args, kwargs)]
            with self._lock:
                self._give(missing)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call, given arguments as the function takes them."""
        return self(args, kwargs)

    def refusal(self) -> Fallback | None:
        """Why calls run as they are: they do not."""
        return None

    def in_python(self) -> str | None:
        """The lines that run as Python at each call: none."""
        return None

    def engines(self) -> Iterator[Engine]:
        """The engine of the function that is passed what it asks for."""
        yield self.engine

    def release(self) -> None:
        """Give back its graphs."""
        self.engine.release()
