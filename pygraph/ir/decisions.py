"""The operation that checks a decision: the answer to a question that Python asks of a value on the device.

=====================  ======================================================================
``pygraph::ask``       raises `DecisionError` where a value is another one than the answer,
                       behind the tensors that another trace needs to go on
``pygraph::sized``     gives a tensor whose sizes were asked for, which are part of the trace
=====================  ======================================================================

Of a condition (``if x.sum() > 0``), the answer is its outcome; of a number that Python needs (``x[:n.item()]``, the
size of ``x[mask]``), it is that number. What a Program does after a question it does for that answer only, and it must
be able to go on, or to begin anew, with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from pygraph.errors import PygraphError
from pygraph.ir.ops import define

Answer: TypeAlias = bool | int | float
"""The outcome of a condition, or a number."""


class DecisionError(PygraphError):
    """A call decides otherwise than its trace.

    No user sees it: the call begins anew with another trace.

    Args:
        index: Which question of the call it is.
        answer: The answer.

    Attributes:
        stopped: The call, as `pygraph.runtime.resuming.Stopped`; None if no other trace can go on with it.
    """

    def __init__(self, index: int, answer: Answer) -> None:
        super().__init__(f"question {index} of a trace has the answer {answer} in a call")
        self.index, self.answer = index, answer
        self.stopped: Any = None


def check(value: Any, answer: Answer, index: int, needed: Sequence[torch.Tensor] | None = None) -> None:
    """Raise `DecisionError` if a value is another one than the answer to a question of this index.

    Args:
        value: The value.
        answer: The answer of the trace.
        index: Which question it is.
        needed: Tensors that are computed before, for another trace to go on with.
    """
    if isinstance(answer, bool):
        if bool(value) is not answer:
            raise DecisionError(index, bool(value))
    elif text_of(value) != text_of(answer):
        raise DecisionError(index, value)


def _ask_fake(value: Any, answer: Answer, index: int, needed: Sequence[torch.Tensor] | None = None) -> None:
    return None


def _sized(x: torch.Tensor, size: list[int]) -> torch.Tensor:
    return x.view(size).contiguous()  # which nonzero's is not on a GPU


def _sized_fake(x: torch.Tensor, size: list[int]) -> torch.Tensor:
    return torch.empty(size, dtype=x.dtype, device=x.device)


define("ask(Scalar value, Scalar answer, int index, Tensor[]? needed=None) -> ()", check, _ask_fake)
define("sized(Tensor x, int[] size) -> Tensor", _sized, _sized_fake)

SIZED: Any = torch.ops.pygraph.sized.default
"""The operation that gives a tensor whose sizes were asked for."""


def ask() -> Callable[..., None]:
    """The operation."""
    return torch.ops.pygraph.ask.default


fx.has_side_effect(ask())


def is_question(node: fx.Node) -> bool:
    """Whether the node is a question; tensors among its arguments are computed before, and not read."""
    return node.target is ask()


def decisions_among(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The questions among nodes."""
    return list(filter(is_question, nodes))


NO_QUESTION = -1
"""The index of an `ask` that is always answered as expected: it is there for the order of what stands around it."""


def text_of(answer: Answer) -> str:
    """An answer as a text, by which answers are told apart: ``0.0`` and ``-0.0``, ``1`` and ``True`` are two.

    >>> text_of(True), text_of(3), text_of(-0.0), text_of(float("nan"))
    ('True', '3', '-0.0', 'nan')
    """
    return repr(answer)


def answer_of(text: str) -> Answer:
    """The answer that a text stands for.

    >>> [answer_of(text) for text in ("True", "3", "-0.0", "inf")]
    [True, 3, -0.0, inf]
    """
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdigit() else float(text)
