"""A function that is passed what it asks of the numbers among its arguments, before these arguments."""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pygraph.calls.asked_numbers import AskedNumbers
from pygraph.tracing.function_kinds import Renaming


class NumberFunction(Renaming):
    """A function of what it asks of numbers, and of its arguments.

    Args:
        fn: The function.
        name: What reports call it.
        asked: What it asks of numbers.
    """

    def __init__(self, fn: Callable[..., Any], name: str, asked: AskedNumbers) -> None:
        self._asked = asked
        self.__name__ = name
        self.__wrapped__ = fn  # where the walk over what a function reaches finds it

    def __call__(self, found: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the function."""
        with self._asked.given(args, kwargs, found):
            return self.__wrapped__(*args, **kwargs)

    def path(self, path: str) -> str:
        """The name that reports give to an argument or a result of this function; none for what is not used."""
        if path == "args[0]":
            return "what is asked of numbers"
        if not path.startswith("args["):
            return path
        kind, rest = int(path[5:].partition("]")[0]), path.partition("]")[2]
        if kind > 0:
            return ("args", "kwargs")[kind - 1] + rest
        return self._asked.name_of(int(rest[1:].partition("]")[0]), str)
