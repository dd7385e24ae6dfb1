"""Calls of a function whose numbers change: what it asks of them is computed before the call.

A number by which a function decides is baked in at first. With its second value, calls are those of a `NumberFunction`,
which is passed the outcomes of comparisons and the numbers that the function computes on the host: it has a trace for
each path, and not one for each number.
"""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pygraph.calls.asked_numbers import AskedNumbers, Leaves
from pygraph.calls.engine import Engine
from pygraph.calls.number_function import NumberFunction
from pygraph.calls.policy import Policy
from pygraph.calls.retries import Traces
from pygraph.ir.descriptors import Fallback
from pygraph.tracing.number_uses import MissingNumbersError, NumberUse


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
        self._asked = AskedNumbers(Leaves.of(args, kwargs))
        self._asked.ask(uses, args, kwargs)
        self._lock = function.shared.lock
        self.engine = function.derive(NumberFunction(function.fn, function.name, self._asked), policy)
        self.traces: Traces | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call."""
        while True:
            try:
                return self.engine(self._asked.of_call(args, kwargs), args, kwargs)
            except MissingNumbersError as error:
                if error.asked is not self._asked:
                    raise
                missing = error.uses
            with self._lock:
                self._asked.give(missing)

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
