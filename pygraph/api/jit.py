"""`pygraph.jit`: all transforms with their defaults, as one decorator, and the options that it shares with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch

from pygraph.api.functions import is_method_wrapper
from pygraph.api.module import TransformedModule, transformed, transformed_behind
from pygraph.api.options import make_options, merged_options, no_unknown_options, selection_policy
from pygraph.api.passes import completed, passes_of
from pygraph.calls.options import check_flag
from pygraph.calls.transformed import Transformed
from pygraph.errors import ArgumentError, describe
from pygraph.ir.selections import Mode, Objective
from pygraph.transforms.passes import PASSES, UNFUSED, records

P = ParamSpec("P")
R = TypeVar("R")

_CALL = "jit(…)"


@overload
def jit(
    fn: torch.nn.Module,
    /,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    max_graphs: int = 64,
    strict: bool = False,
    reuse_outputs: bool = False,
    bounds: Mapping[str, int | None] | None = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    fuse: bool = False,
    objective: Objective = "throughput",
    budget: float = 1.0,
    mode: Mode = "measure",
    passes: Sequence[Any] | None = None,
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
    reuse_outputs: bool = False,
    bounds: Mapping[str, int | None] | None = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    fuse: bool = False,
    objective: Objective = "throughput",
    budget: float = 1.0,
    mode: Mode = "measure",
    passes: Sequence[Any] | None = None,
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
    reuse_outputs: bool = False,
    bounds: Mapping[str, int | None] | None = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    fuse: bool = False,
    objective: Objective = "throughput",
    budget: float = 1.0,
    mode: Mode = "measure",
    passes: Sequence[Any] | None = None,
) -> Callable[[Callable[P, R]], Transformed[P, R]]: ...


@no_unknown_options
def jit(  # noqa: PLR0913  # the options that users have
    fn: Any = None,
    /,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    max_graphs: int = 64,
    strict: bool = False,
    reuse_outputs: bool = False,
    bounds: Mapping[str, int | None] | None = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    fuse: bool = False,
    objective: Objective = "throughput",
    budget: float = 1.0,
    mode: Mode = "measure",
    passes: Sequence[Any] | None = None,
) -> Any:
    """Run a function or module as CUDA graphs: ``select(graphify(indirect(devicify(fn))))`` with a cache.

    Args:
        fn: A function over any pytree of tensors, numbers, ``None`` and static values, or an ``nn.Module``, whose
            parameters and buffers are found again when they move. None to use it as a decorator with options.
        static_argnums: Positions of arguments that are baked in; a new value traces anew. As in JAX, ``==`` and the
            hash of their classes decide which value is new.
        static_argnames: Names of keyword arguments that are baked in.
        max_graphs: How many kinds of calls are kept as graphs; the least recently used one makes room.
        strict: Raise FallbackError where something would not run as a graph, but for a call that makes state once, as
            the first step of an optimizer. What the function's own code raises is raised as in eager.
        reuse_outputs: Write results to the same memory at every call instead of allocating it, as torch.compile's
            ``mode="reduce-overhead"`` does: any later call of this function may overwrite them. A result may be an
            argument of the next call, which copies it; what is to be kept longer must be cloned.
        bounds: The most entries of results whose size depends on data, which are padded to it; see `devicify`.
        donate_argnums: Positions of arguments that a call consumes, as in JAX: results may take over their memory, and
            using such a tensor afterwards raises DonatedError. All tensors of a pytree are donated, numbers are not.
        donate_argnames: Names of arguments that a call consumes.
        fuse: Have Inductor fuse operations to fewer kernels, as ``torch.compile`` does: faster to run, seconds to
            compile, and results within the dtype's tolerance of eager's instead of equal to them.
        objective: The time by which ways of running are selected: ``throughput``, ``latency`` or ``cpu``; see `select`.
        budget: Seconds for the measurements of one kind of call.
        mode: The ground of selections: ``measure``, ``heuristic``, ``replay`` or ``launch``; see `select`.
        passes: The transforms to apply instead of these, in order: pygraph's and what `pygraph.transform` returns. A
            function with transforms that record nothing yet, as ``jit(devicify(fn))``, is completed by the others.

    Returns:
        A function with the same signature, or for a module a module that shares all its state.

    Raises:
        ArgumentError: An option has a wrong value.
        FallbackError: With ``strict``, when called.
        DonatedError: When called with a tensor that was donated before.

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
        "reuse_outputs": reuse_outputs,
        "bounds": bounds,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "selection": selection_policy(_CALL, objective, budget, mode),
    }
    check_flag(_CALL, "fuse", fuse)
    if passes is not None and fuse:
        raise ArgumentError(describe(_CALL, "fuse=True and passes", remedy="Put pygraph.fuse among the passes."))
    passes = list(passes) if isinstance(passes, Iterator) else passes
    stack = (PASSES if fuse else UNFUSED) if passes is None else passes_of(passes)
    checked = make_options(_CALL, **options)
    options = {name: getattr(checked, name) for name in options}  # what was an iterator has been read
    if fn is None or is_method_wrapper(fn):
        options.pop("selection")
        decorator = functools.partial(
            jit, fuse=fuse, passes=passes, objective=objective, budget=budget, mode=mode, **options
        )  # fmt: skip
        return decorator if fn is None else type(fn)(decorator(fn.__func__))
    inner = transformed_behind(fn)
    if inner is not None and not records(inner.passes):
        return transformed(inner.fn, completed(inner.passes, stack), merged_options(_CALL, inner.options, options))
    return transformed(fn, stack, checked)
