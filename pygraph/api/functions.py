"""Functions that can be transformed, and options that fit them: checked when they are given, before the first call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from pygraph.calls.options import Options
from pygraph.errors import ArgumentError, describe

_EXPECTED = "a function or an nn.Module"


def check_function(transform: str, fn: Any) -> None:
    """Refuse what is no function that computes with its arguments, and say what to do instead.

    Args:
        transform: The name of what the user has called.
        fn: What it was given.

    Raises:
        ArgumentError: It is a class, an async function or a generator function, or cannot be called.
    """
    name, kind = getattr(fn, "__name__", repr(fn)), type(fn).__name__
    call = f"{transform}({name})"
    if isinstance(fn, type):
        remedy = f"Make an object of it, and transform that: {transform}({name}(…))."
        raise ArgumentError(describe(call, f"{name} is a class", expected=_EXPECTED, remedy=remedy))
    if isinstance(fn, (property, functools.cached_property)):
        remedy = f"Put @{transform} below @{kind}."
        raise ArgumentError(describe(f"{transform}({kind})", f"it is a {kind}", expected=_EXPECTED, remedy=remedy))
    if not callable(fn):
        raise ArgumentError(describe(call, "not callable", expected=_EXPECTED))
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        remedy = "Transform the function that computes, and call that from the async one."
        raise ArgumentError(describe(call, f"{name} is an async function", expected=_EXPECTED, remedy=remedy))
    if inspect.isgeneratorfunction(fn):
        remedy = "Transform the function that computes one item, and call that from the generator."
        raise ArgumentError(describe(call, f"{name} is a generator function", expected=_EXPECTED, remedy=remedy))


def is_method_wrapper(fn: object) -> bool:
    """Whether something is what ``@staticmethod`` or ``@classmethod`` makes of a function."""
    return isinstance(fn, (staticmethod, classmethod))


def check_parameters(transform: str, fn: Any, options: Options) -> None:
    """Refuse options that name arguments which a function does not have.

    Args:
        transform: The name of what the user has called.
        fn: The function or module.
        options: The options.

    Raises:
        ArgumentError: There is no argument at such a position, or of such a name.
    """
    try:
        # What a decorator has wrapped may take other arguments than the decorated function.
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions in C have none
        return
    parameters = list(signature.parameters.values())
    positional = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    kinds = {one.kind for one in parameters}
    call = f"{transform}({getattr(fn, '__name__', type(fn).__name__)})"
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        _check(call, "argnums", options, range(-len(positional), len(positional)), positional)
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        _check(call, "argnames", options, named, named)


def _check(call: str, ending: str, options: Options, known: Sequence[object], names: Sequence[str]) -> None:
    for option in (f"static_{ending}", f"donate_{ending}"):
        for value in getattr(options, option):
            if value not in known:
                expected = f"one of its arguments: {', '.join(names)}" if names else "a function with arguments"
                raise ArgumentError(describe(call, f"{option} has {value!r}", expected=expected))
