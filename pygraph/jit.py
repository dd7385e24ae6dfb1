"""`pygraph.jit`: all transforms with their defaults, as one decorator, and the options that it shares with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch

from pygraph.errors import ArgumentError, describe
from pygraph.program import Mechanism
from pygraph.transformed import PASSES, Options, Transformed

if TYPE_CHECKING:
    from pygraph.module import TransformedModule

P = ParamSpec("P")
R = TypeVar("R")


@overload
def jit(
    fn: torch.nn.Module,
    /,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    max_graphs: int = 64,
    strict: bool = False,
) -> TransformedModule: ...


@overload
def jit(
    fn: Callable[P, R],
    /,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    max_graphs: int = 64,
    strict: bool = False,
) -> Transformed[P, R]: ...


@overload
def jit(
    fn: None = None,
    /,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    max_graphs: int = 64,
    strict: bool = False,
) -> Callable[[Callable[P, R]], Transformed[P, R]]: ...


def jit(
    fn: Any = None,
    /,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    max_graphs: int = 64,
    strict: bool = False,
) -> Any:
    """Run a function or module as CUDA graphs: ``select(graphify(indirect(devicify(fn))))`` with a cache.

    Args:
        fn: A function over any pytree of tensors, numbers, ``None`` and static values, or an ``nn.Module``, whose
            parameters and buffers are found again when they move. None to use it as a decorator with options.
        static_argnums: Positions of arguments that are baked in; a new value traces anew.
        static_argnames: Names of keyword arguments that are baked in.
        max_graphs: How many kinds of calls are kept as graphs; the least recently used one makes room.
        strict: Raise FallbackError where something would not run as a graph.

    Returns:
        A function with the same signature, or for a module a module that shares all its state.

    Raises:
        ArgumentError: An option has a wrong value.
        FallbackError: With ``strict``, when called.

    Example:
        >>> import torch, pygraph
        >>> @pygraph.jit
        ... def step(x, scale):
        ...     return torch.relu(x) * scale
        >>> x = torch.tensor([-1.0, 2.0], device=pygraph.default_device())
        >>> step(x, 3.0).tolist(), step(x, 0.5).tolist()
        ([0.0, 6.0], [0.0, 1.0])
        >>> step.cache_info().misses
        1
    """
    options: dict[str, Any] = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "max_graphs": max_graphs,
        "strict": strict,
    }
    if fn is None:
        return functools.partial(jit, **options)
    return transformed(fn, PASSES, make_options(**options))


def make_options(
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    max_graphs: int = 64,
    strict: bool = False,
    timer: Callable[[Callable[[], object]], float] | None = None,
    mechanism: Mechanism = "auto",
) -> Options:
    """Check options and put them in one form."""
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    if not _all_are(int, numbers):
        raise ArgumentError(describe("jit(…)", f"static_argnums={static_argnums!r}", expected="integers"))
    if not _all_are(str, names):
        raise ArgumentError(describe("jit(…)", f"static_argnames={static_argnames!r}", expected="strings"))
    if not _all_are(int, [max_graphs]) or isinstance(max_graphs, bool) or max_graphs < 1:
        raise ArgumentError(describe("jit(…)", f"max_graphs={max_graphs!r}", expected="a positive integer"))
    return Options(numbers, names, max_graphs, strict, timer, mechanism)


def _all_are(kind: type, values: Sequence[object]) -> bool:
    return all(isinstance(value, kind) for value in values)


def transformed(fn: Any, passes: tuple[str, ...], options: Options) -> Any:
    """A Transformed function, or for a module a module around one."""
    if not callable(fn):
        raise ArgumentError(describe(f"{passes[-1]}({fn!r})", "not callable", expected="a function or an nn.Module"))
    if isinstance(fn, torch.nn.Module):
        from pygraph.module import TransformedModule

        return TransformedModule(fn, Transformed(fn, passes, options))
    return Transformed(fn, passes, options)
