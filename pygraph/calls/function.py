"""A function with its stack of passes and options, and one call of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from pygraph.calls.options import Options
from pygraph.transforms.passes import Pass, records


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A function with its stack of passes.

    Attributes:
        fn: The function or module.
        passes: The passes, in the order in which they are applied.
        options: The options of the stack.
        as_it_is: What calls run that are no graphs: the function, whose modules may be graphs.
    """

    fn: Callable[..., Any]
    passes: tuple[Pass, ...]
    options: Options
    as_it_is: Callable[..., Any]

    @property
    def name(self) -> str:
        """The function's name, for reports and errors."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def records(self) -> bool:
        """Whether its calls are recorded as graphs."""
        return records(self.passes)


CONDITION = "a condition"
"""The path of a comparison of numbers that decides what a call does, and is made before it."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Call:
    """The arguments of one call.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        leaves: The leaves of ``(args, kwargs)``.
        structure: A key of their structure.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    structure: Hashable
