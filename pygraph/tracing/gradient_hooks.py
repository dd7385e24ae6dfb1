"""Hooks of tensors in traces: autograd calls the user's functions, which nothing in a function's own code leads to."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator, Mapping
from typing import Any

import torch

from pygraph.errors import TraceError
from pygraph.guards.environment import Environment
from pygraph.guards.tensor_hooks import hooks_of

_Tensor: Any = torch.Tensor
_graph: Any = torch.autograd.graph

ADD_HOOKS: Any = (_Tensor.register_hook, _Tensor.register_post_accumulate_grad_hook)
"""The functions that register a hook on the gradient of one tensor."""

FINDS_NODE: Any = (_Tensor.view_as, _graph._get_grad_fn_or_grad_acc.__code__)
"""The method by which `register_multi_grad_hook` finds the node of a tensor, and the code that calls it then.

Private; checked with torch 2.11 and 2.13.
"""

_by_pygraph: contextvars.ContextVar[bool] = contextvars.ContextVar("by_pygraph", default=False)


@contextlib.contextmanager
def differentiating() -> Generator[None, None, None]:
    """A block in which pygraph differentiates the function: hooks of its leaves are called by the outer backward."""
    token = _by_pygraph.set(True)
    try:
        yield
    finally:
        _by_pygraph.reset(token)


class UnseenHooksError(TraceError):
    """A function differentiates a tensor whose hooks were not among what it can reach, to be looked at again."""


class GradientHooks:
    """The hooks of tensors that autograd may call in a trace.

    Args:
        environment: What the function can reach besides its arguments.
        arguments: Its arguments, by path.

    Attributes:
        may_be_called: Whether the function has had anything differentiated.
        unseen: Whether there are hooks that are not among what it can reach.
    """

    def __init__(self, environment: Environment, arguments: Mapping[str, Any]) -> None:
        self._environment, self._arguments = environment, arguments
        self.may_be_called = self.unseen = False

    def problem(self) -> str | None:
        """Why nothing can be differentiated here, in words, where a function is about to; None if it can."""
        if _by_pygraph.get():
            return None
        self.may_be_called = True
        hooked = (
            path
            for path, leaf in self._arguments.items()
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and any(hooks_of(leaf))
        )
        if (path := next(hooked, None)) is not None:
            return f"it differentiates {path}, which has hooks on its gradient"
        if not self._environment.follows_hooks:
            self.unseen = any(any(hooks_of(tensor)) for tensor in self._environment.tensors)
        return "tensors that it closes over have hooks on their gradients" if self.unseen else None
