"""The plan of one kind of call, as data: what a call must match, and what it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pygraph.calls.keys import Key
from pygraph.calls.requirements import Requirements
from pygraph.runtime.executable import Executable


@dataclasses.dataclass(frozen=True, eq=False)
class CallPlan:
    """One kind of call.

    It is made when the first such call is compiled. In Python, a call finds it by its key and runs if its requirements
    hold. For the native path, `pygraph.calls.plan_description` describes it, and C++ compares the same.

    Attributes:
        key: Structure, layouts, alignment and shared memory of arguments, static values, and torch's settings.
        live: The positions of numbers that are read at every call.
        device_type: The accelerator whose autocast is among the settings.
        requirements: Python's state and the tensors that calls depend on besides.
        target: What runs: an executable, called with the leaves of ``(args, kwargs)``, or a function, called as the
            user's is.
        is_eager: Whether that is the user's function itself, which is right whatever has changed.
        released: Items of the list that is the first argument which calls take out of it before results are allocated.
    """

    key: Key
    live: frozenset[int]
    device_type: str
    requirements: Requirements
    target: Executable | Callable[..., Any]
    is_eager: bool = False
    released: tuple[int, ...] = ()

    @property
    def executable(self) -> Executable | None:
        """The graphs that calls replay."""
        return self.target if isinstance(self.target, Executable) else None
