"""Calls of a function that a context manager of torch decorates: the function inside is called in its context.

    @torch.inference_mode()            with torch.inference_mode():
    def f(x):                   ─▶         (graphs of f's own statements)(x)
        ...

In inference mode, so that its results are tensors of that mode; elsewhere, where the function can be no graph as a
whole, so that its own statements can be told apart.
"""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pygraph.calls.engine import Engine
from pygraph.calls.policy import Policy
from pygraph.calls.retries import Traces
from pygraph.ir.descriptors import Fallback
from pygraph.tracing.decorated import Decorated


class DecoratedCalls:
    """Runs calls of a function in the context that decorates it.

    Args:
        function: The function's engine.
        decorated: The context, and the function inside.
        policy: The rules of that function.

    Attributes:
        engine: Its engine.
        traces: The budget of traces of such calls.
    """

    def __init__(self, function: Engine, decorated: Decorated, policy: Policy) -> None:
        self._context = decorated.context
        self.engine = function.derive(decorated.inner, policy, function.function.options)
        self.traces: Traces | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call."""
        with self._context():
            return self.engine(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call, given arguments as the function takes them."""
        return self(args, kwargs)

    def refusal(self) -> Fallback | None:
        """Nothing: what runs as it is does so in the context."""
        return None

    def engines(self) -> Iterator[Engine]:
        """The engine of the function inside."""
        yield self.engine

    def in_python(self) -> str | None:
        """Nothing: the report of the function inside says it."""
        return None

    def release(self) -> None:
        """Give back its graphs."""
        self.engine.release()
