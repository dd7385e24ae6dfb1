"""Functions that a context of torch decorates, as ``@torch.no_grad()``: the context, and the function inside."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pygraph.tracing.function_parts import CutError, plain_function


class Decorated(NamedTuple):
    """A function that runs in a context.

    Attributes:
        context: Makes the context of a call.
        inner: The function inside of it.
        is_inference: Whether the context is inference mode.
    """

    context: Callable[[], Any]
    inner: Callable[..., Any]
    is_inference: bool


def _example() -> None:
    pass


# The code of all functions that torch decorates; its variables have these names in torch 2.11 and 2.13.
DECORATED: types.CodeType = torch.no_grad()(_example).__code__
_CONTEXT, _INNER = "ctx_factory", "func"


def decoration_of(fn: Any) -> Decorated | None:
    """Find what decorates a function, a method or a module's ``forward``; None if no context of torch does."""
    try:
        plain, instance = plain_function(fn)
    except CutError:
        return None
    if plain.__code__ is not DECORATED:
        return None
    cells = dict(zip(DECORATED.co_freevars, plain.__closure__ or (), strict=True))
    context, inner = cells[_CONTEXT].cell_contents, cells[_INNER].cell_contents
    manager = getattr(context, "__self__", None)
    if instance is not None:
        inner = types.MethodType(inner, instance)
    return Decorated(context, inner, isinstance(manager, torch.inference_mode) and bool(manager.mode))
