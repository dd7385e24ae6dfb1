"""Calling functions as they are: ``with pygraph.disable():``, or ``PYGRAPH_DISABLE=1`` for a whole process."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")

_is_wanted = os.environ.get("PYGRAPH_DISABLE", "0") not in ("", "0")
_here: contextvars.ContextVar[bool] = contextvars.ContextVar("pygraph.disable", default=_is_wanted)

blocks: int = int(_is_wanted)
"""Blocks that are open in any thread: a call looks no further where there are none."""


class Block(Protocol):
    """A block, or a decorator of functions whose calls are such blocks."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> bool | None: ...

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]:
        """Decorate a function."""
        ...


@overload
def disable() -> Block: ...


@overload
def disable(function: Callable[P, R]) -> Callable[P, R]: ...


def disable(function: Callable[..., Any] | None = None) -> Any:
    """Call transformed functions and modules as they are in this block, as ``jax.disable_jit`` does.

    It is a decorator as well: in the calls of a function, they are as they are.

    For comparing with eager, and for debuggers: every line of a function runs, with real tensors. It holds for this
    thread, or this task of asyncio. What ``torch.compile(backend="pygraph")`` has compiled is not concerned; there,
    ``torch.compiler.set_stance("force_eager")`` does the same. ``PYGRAPH_DISABLE=1`` disables everything.

    Example:
        >>> import torch, pygraph
        >>> seen = []
        >>> fast = pygraph.jit(lambda x: seen.append(type(x).__name__) or x + 1)
        >>> x = torch.ones(2, device=pygraph.default_device())
        >>> with pygraph.disable():
        ...     fast(x).tolist(), seen
        ([2.0, 2.0], ['Tensor'])
        >>> fast.cache_info().misses
        0
    """
    return _disabled() if function is None else _disabled()(function)


@contextlib.contextmanager
def _disabled() -> Generator[None, None, None]:
    global blocks
    token = _here.set(True)
    blocks += 1
    try:
        yield
    finally:
        blocks -= 1
        _here.reset(token)


def is_disabled() -> bool:
    """Whether calls in this thread, or task, run as they are."""
    return _here.get()
