"""Decisions: Python code that asks for the truth of a value on the device, as by ``if`` and ``while``.

A trace takes an outcome for granted, which is recorded as an operation that checks it (`pygraph.ir.decisions`). So it
is only done for a caller that makes another trace where the outcome is another one, see `pygraph.calls.deciding`.
"""

# Symbols and conditions have no types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # checked with torch 2.11 and 2.13
from torch.overrides import TorchFunctionMode

from pygraph.errors import TraceError
from pygraph.ir.decisions import decide
from pygraph.tracing.patches import replaced

MAX_DECISIONS = 16
"""As many decisions as a trace makes; more are taken for a loop whose length is data."""


class Decisions:
    """The outcomes that one trace takes for granted.

    Args:
        given: Those of its first decisions; any further one is guessed to be false.

    Attributes:
        outcomes: All of them.
    """

    def __init__(self, given: Sequence[bool]) -> None:
        self._given = tuple(given)
        self._known: dict[Any, bool] = {}
        self.outcomes: list[bool] = []

    def outcome(self, condition: Any) -> bool:
        """The outcome of a condition, whose check is recorded the first time."""
        expression = condition.node.expr
        if expression not in self._known:
            index = len(self.outcomes)
            if index >= MAX_DECISIONS:
                raise TraceError(f"it decides more than {MAX_DECISIONS} times by values on the device")
            expected = self._given[index] if index < len(self._given) else False
            decide()(condition, expected, index)
            self._known[expression] = expected
            self.outcomes.append(expected)
        return self._known[expression]


class _Here(threading.local):
    decisions: Decisions | None = None


_here = _Here()


@contextlib.contextmanager
def deciding(given: Sequence[bool]) -> Generator[Decisions, None, None]:
    """Have what is traced inside decide by these outcomes."""
    before, _here.decisions = _here.decisions, Decisions(given)
    try:
        yield _here.decisions
    finally:
        _here.decisions = before


class Questions(TorchFunctionMode):
    """Answers questions for the truth of values that only a run knows, by the outcomes given.

    Attributes:
        undecided: Whether there was one, and no outcomes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.undecided = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKING and _here.decisions is not None and args[0].numel() == 1 and not args[0].is_complex():
            return bool(args[0].item())
        try:
            return func(*args, **(kwargs or {}))
        except GuardOnDataDependentSymNode:
            self.undecided = self.undecided or func in _ASKING
            raise

    @contextlib.contextmanager
    def noticed(self) -> Generator[None, None, None]:
        """Notice questions for the truth of numbers as well for the time of the context."""
        with contextlib.ExitStack() as stack:
            for kind in (torch.SymBool, torch.SymInt, torch.SymFloat):
                stack.enter_context(replaced(kind, "__bool__", self._noticing))
            yield

    def _noticing(self, truth: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def noticed(number: Any) -> bool:
            try:
                return truth(number)
            except GuardOnDataDependentSymNode:
                if threading.get_ident() != self._thread:
                    raise
                if _here.decisions is None:
                    self.undecided = True
                    raise
            return _here.decisions.outcome(number if isinstance(number, torch.SymBool) else number != 0)

        return noticed


# Private; checked with torch 2.11 and 2.13.
_Tensor: Any = torch.Tensor
_ASKING = (_Tensor.__bool__, _Tensor.is_nonzero, torch.is_nonzero)
