"""The operation that checks a decision: the outcome of a Python ``if`` on a value of the device.

=====================  ==========================================================================
``pygraph::decide``    raises `DecisionError` where a condition has another outcome than expected
=====================  ==========================================================================

What a Program does after a decision it does for that outcome only, and it must be able to begin anew with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from pygraph.errors import PygraphError
from pygraph.ir.ops import define


class DecisionError(PygraphError):
    """A call decides otherwise than its trace.

    No user sees it: the call begins anew with another trace.

    Args:
        index: Which decision of the call it is.
        outcome: The outcome of its condition.
    """

    def __init__(self, index: int, outcome: bool) -> None:
        super().__init__(f"decision {index} of a trace has the outcome {outcome} in a call")
        self.index, self.outcome = index, outcome


def _decide(condition: Any, expected: bool, index: int) -> None:
    if bool(condition) != expected:
        raise DecisionError(index, bool(condition))


def _decide_fake(condition: Any, expected: bool, index: int) -> None:
    return None


define("decide(Scalar condition, bool expected, int index) -> ()", _decide, _decide_fake)


def decide() -> Callable[..., None]:
    """The operation."""
    return torch.ops.pygraph.decide.default


fx.has_side_effect(decide())


def decisions_among(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The decisions among nodes."""
    return [node for node in nodes if node.target is decide()]
