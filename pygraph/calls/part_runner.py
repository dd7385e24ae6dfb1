"""Calls that cannot be traced as a whole: they run part by part, or as they are."""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils import _pytree as pytree

from pygraph.calls.cutting import Cutting
from pygraph.calls.engine import Engine
from pygraph.calls.opened_function import AsItWas, call_of
from pygraph.calls.retries import Traces
from pygraph.guards.opened import is_opened
from pygraph.ir.descriptors import Fallback


class PartRunner:
    """Runs calls that cannot be traced as a whole.

    Args:
        function: The function.
        cutting: Its cuts.
        reason: Why there is no trace.

    Attributes:
        traces: The budget of traces of such calls.
    """

    def __init__(self, function: Engine, cutting: Cutting, reason: str) -> None:
        self._function, self._cutting, self._note = function, cutting, Fallback("the call", reason)
        self.traces: Traces | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call."""
        parts = self._cutting.parts()
        return self._function.run_inline(self._note, args, kwargs) if parts is None else parts(args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call, given arguments as the function takes them."""
        return self(args, kwargs)

    def refusal(self) -> Fallback | None:
        """Why calls run as they are for now; None if they do not."""
        return self._note if self._cutting.parts() is None else None

    def in_python(self) -> str | None:
        """The lines that run as Python at each call, and why; None if there are none."""
        return self._cutting.in_python()

    def engines(self) -> Iterator[Engine]:
        """The engines of the parts."""
        parts = self._cutting.parts()
        return iter(()) if parts is None else parts.engines()

    def release(self) -> None:
        """Give back its graphs."""
        for engine in self.engines():
            engine.release()


class PartRunnerOfObjects(PartRunner):
    """Runs calls with arguments that are taken apart, of a function that is cut: with the caller's own arguments."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call; `AsItWas` of what it returns."""
        call = call_of(pytree.tree_leaves((args, kwargs), is_leaf=is_opened))
        assert call is not None  # else objects were put together, of a function that is differentiated as a whole
        return AsItWas(super().__call__(call.args, call.kwargs))
