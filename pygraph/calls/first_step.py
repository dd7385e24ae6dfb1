"""The first call of a training step, in which its optimizers make their state: it runs as it is, without a trace.

A trace of it would be in vain, as it would end where state is made: at the end. What the call has done tells how the
next one is traced.
"""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from pygraph.calls.engine import Engine
from pygraph.calls.entries import StateRunner
from pygraph.calls.policy import Policy
from pygraph.calls.retries import Traces
from pygraph.ir.descriptors import Fallback
from pygraph.tracing.function_kinds import StateInputs

_NOTE = Fallback("the call", "it is the first step of its optimizer, which makes its state")


class FirstStep:
    """Runs calls of a function that reaches optimizers without state.

    Args:
        function: The function's engine.
        users: The rules of the function.
        optimizers: The optimizers.

    Attributes:
        traces: The budget of traces of such calls.
    """

    def __init__(self, function: Engine, users: Policy, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._function, self._users, self._optimizers = function, users, tuple(optimizers)
        self._runner: StateRunner | None = None
        self.traces: Traces | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call: the first one as it is, those after it as steps if that was one."""
        function, optimizers = self._function, self._optimizers
        if not optimizers:  # as of a trace that was in vain, the reason is reported until the next call
            function.cache.inlined.pop(_NOTE, None)
        if self._runner is not None:
            return self._runner(args, kwargs)
        if optimizers:
            before = _gradients(optimizers)
            result = function.run_inline(_NOTE, args, kwargs, once=True)
            is_step = any(one.state for one in optimizers) or any(
                now is not then for now, then in zip(_gradients(optimizers), before, strict=False)
            )
            self._optimizers = ()
            if is_step:
                with function.shared.lock:
                    self._runner = self._users.state_runner(function, args, kwargs, StateInputs(gradients=True))
                    self._runner.traces = self.traces
            return result
        with function.shared.lock:  # it only holds an optimizer, as a module does that others train
            for entry in [one for one in function.cache.entries if getattr(one, "runner", None) is self]:
                function.cache.entries.drop(entry)
        return function.call(args, kwargs, again=True)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call, given arguments as the function takes them."""
        return self(args, kwargs)

    def refusal(self) -> Fallback | None:
        """Why calls run as they are for now; None if they do not."""
        return None if self._runner is None else self._runner.refusal()

    def engines(self) -> Iterable[Any]:
        """The engines of the functions that run instead."""
        return () if self._runner is None else self._runner.engines()

    def in_python(self) -> str | None:
        """The lines that run as Python at each call, and why; None if there are none."""
        return None if self._runner is None else self._runner.in_python()

    def release(self) -> None:
        """Give back its graphs."""
        if self._runner is not None:
            self._runner.release()


def _gradients(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor | None]:
    return [tensor.grad for tensor in _parameters(optimizers)]


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    return (tensor for one in optimizers for group in one.param_groups for tensor in group["params"])
