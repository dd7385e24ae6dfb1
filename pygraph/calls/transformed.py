"""A transformed function: what every transform returns, and users call instead of their function."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import torch

from pygraph.calls import disabling
from pygraph.calls.cache import CacheInfo
from pygraph.calls.donation import Donation
from pygraph.calls.engine import Engine
from pygraph.calls.options import Options, check_flag
from pygraph.calls.pace import Pace
from pygraph.calls.policy import CompositionFactory
from pygraph.calls.stages import Lowered, lower
from pygraph.calls.users_policy import UsersPolicy
from pygraph.errors import FallbackError
from pygraph.report.explain import Explanation
from pygraph.runtime.node_errors import has_line
from pygraph.tracing.error_frames import without_ours
from pygraph.transforms.passes import Pass, records

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


# Passes that keep the order of operations around a decision.
_PLAIN_PASSES = frozenset({"devicify", "fuse", "indirect", "graphify", "select"})


class _WithAttributes:
    """An object with attributes of its own, whatever its class makes of ``__dict__``."""


class Transformed(_WithAttributes, Generic[P, R]):
    """A function with a stack of transforms; call it as the function itself.

    Attributes that users set, read and delete are the function's, which may read them by its own name.

    Args:
        fn: The function or module.
        passes: The passes of its transforms, in the order in which they are applied.
        options: How arguments and the cache are treated.
        composition: Makes what runs calls inside transforms of ``torch.func`` and under autograd.

    Attributes:
        engine: What compiles and runs its calls.
        donation: The arguments that calls consume; None if there are none.
    """

    def __init__(
        self,
        fn: Callable[P, R],
        passes: tuple[Pass, ...],
        options: Options,
        composition: CompositionFactory,
    ) -> None:
        self.fn: Callable[..., R] = fn
        self.passes = passes
        self.options = options
        # What is consumed, or written to memory that is used again, is gone when a call is to begin anew.
        decides = not options.donates and not options.reuse_outputs and {one.name for one in passes} <= _PLAIN_PASSES
        policy = UsersPolicy(carries_state=not options.donates, decides=decides and records(passes))
        self.engine = Engine(fn, passes, options, policy=policy, composition=composition)
        self.donation: Donation | None = None
        if options.donates:
            self.donation = Donation(fn, options, self.engine.name)
            self.engine.recorder.donation = self.donation
        self._pace = Pace(self.engine)
        self._composition = composition
        self._native = self.engine.cache.native
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function."""
        if torch.compiler.is_dynamo_compiling():  # known to Dynamo, which sees the function and nothing else
            return self.fn(*args, **kwargs)
        if disabling.blocks and disabling.is_disabled():
            return self.fn(*args, **kwargs)
        if self.donation is not None:
            return self.donation.around(self.engine, args, kwargs)
        native, pace = self._native, self._pace
        try:
            if pace.watches:
                return pace.run(args, kwargs)
            if native.dispatch is not None and not torch.compiler.is_compiling():
                result = native.dispatch(args, kwargs)
                if result is not native.miss:
                    return result
            result = self.engine.call(args, kwargs)
            pace.note_compilations()
            return result
        except FallbackError as error:
            raise error.with_traceback(None) from error.__cause__  # without the frames that came to know of it
        except Exception as error:
            error.__traceback__ = None if has_line(error) else without_ours(error.__traceback__)
            raise

    def cache_info(self) -> CacheInfo:
        """Hits, misses, graphs captured, evictions, and kinds of calls held."""
        return self.engine.cache_info()

    def cache_clear(self) -> None:
        """Forget every trace and give back every graph; from inside a call, before this function's next one."""
        self.engine.cache_clear()
        if self.donation is not None:
            self.donation.notes.clear()

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Trace and transform for these arguments without recording.

        Shapes suffice: a tensor on the device ``meta`` stands for one of its shape, strides and dtype.

        Returns:
            The Program, which ``compile()`` records.

        Raises:
            TraceError: The function cannot be traced with these arguments.
        """
        return lower(self.engine, self.donation, args, kwargs)

    def explain(self, *, profile: bool = False) -> Explanation:
        """The report of how every kind of call runs, with the reason for everything that is not a graph.

        Args:
            profile: Whether to include kernel times by source line. They are measured beside a call: each kind of call
                of which there are none yet is measured at its next call, which takes longer and gives the same result.

        Raises:
            ArgumentError: ``profile`` is neither True nor False.

        Example:
            >>> import torch, pygraph
            >>> fast = pygraph.jit(lambda x: x.sin() + 1)
            >>> x = torch.ones(4, device=pygraph.default_device())
            >>> _ = fast(x), fast.explain(profile=True), fast(x)
            >>> for row in fast.explain(profile=True).to_dict()["profile"]["rows"]:
            ...     print(row["operations"], row["kernels"])
            ('aten.sin.default', 'aten.add.Tensor') 2
        """
        check_flag(f"{self.engine.name}.explain(…)", "profile", profile)
        report = self.engine.explain(profile)
        return report if self.donation is None else report.with_donated(self.donation.notes)

    def explain_misses(self) -> str:
        """The calls that were compiled, with the user's line, in what they were unlike earlier ones, and the outcome.

        The last 64 of the function, and of each that is derived from it (its gradient, say), a line each.

        Example:
            >>> import torch, pygraph
            >>> fast, device = pygraph.jit(lambda x, n: x[:n] * 2), pygraph.default_device()
            >>> _ = fast(torch.ones(4, device=device), 2), fast(torch.ones(4, device=device), 3)
            >>> print(fast.explain_misses())  # doctest: +ELLIPSIS
            <lambda>: miss 1 (...): the first call; recorded as 1 graph, in ... s
            <lambda>: miss 2 (...): args[1] is 3 and was 2; recorded as 1 graph, in ... s
        """
        engines = self.engine.family()
        return "\n".join(f"{one.name}: {miss}" for one in engines for miss in one.compiler.recompilations.misses.found)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: Transformed[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> BoundMethod[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind as a method does, so that methods can be decorated; the instance is a static argument."""
        if instance is None:
            return self
        kind: Any = functools.partial if torch.compiler.is_dynamo_compiling() else BoundMethod  # the one that it knows
        return kind(self, instance)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # For pickles and copies: what a module has a name for goes by that name, as functions do; anything else as
        # the function and its options, without graphs.
        module, path = getattr(self, "__module__", None), getattr(self, "__qualname__", None)
        if module is not None and path is not None and _lookup(module, path) is self:
            return path
        return type(self), (self.fn, self.passes, self.options, self._composition)

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        # ``functools.wraps`` copies it, as it does that of a function.
        return getattr(self.fn, "__dict__", {})

    def __getattr__(self, name: str) -> Any:
        # For torch.export, the forward of a module has code (2.11 to 2.13).
        if (name.startswith("__") and name != "__code__") or "fn" not in _own(self):
            raise AttributeError(name)
        return getattr(self.fn, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or name.startswith("__") or hasattr(type(self), name):
            object.__setattr__(self, name, value)
            return
        try:
            setattr(self.fn, name, value)
        except AttributeError:  # a method, which has none
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _own(self):
            object.__delattr__(self, name)
        else:
            delattr(self.fn, name)

    def __repr__(self) -> str:
        inner = self.engine.name
        for one in self.passes:
            inner = f"{one.name}({inner})"
        return f"<pygraph {inner}>"


_own: Callable[[Any], dict[str, Any]] = vars(_WithAttributes)["__dict__"].__get__
_OWN = frozenset({"fn", "passes", "options", "engine", "donation", "_pace", "_composition", "_native"})


class BoundMethod(functools.partial[R], Generic[Q, R]):
    """A transformed method of an object: called with the object as first argument, which C does.

    All else (``explain()``, ``cache_info()`` …) is that of the transformed function, for all objects together.
    """

    if TYPE_CHECKING:

        def __call__(self, /, *args: Q.args, **kwargs: Q.kwargs) -> R: ...  # noqa: D102
        def cache_info(self) -> CacheInfo: ...  # noqa: D102
        def cache_clear(self) -> None: ...  # noqa: D102
        def explain(self, *, profile: bool = False) -> Explanation: ...  # noqa: D102
        def explain_misses(self) -> str: ...  # noqa: D102

    def lower(self, *args: Q.args, **kwargs: Q.kwargs) -> Lowered:
        """As of the transformed function, for this object."""
        function: Any = self.func
        return function.lower(*self.args, *args, **self.keywords, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__qualname__"):
            raise AttributeError(name)
        return getattr(self.func, name)


def _lookup(module: str, path: str) -> Any:
    """The object that a name stands for now; None if there is none."""
    value: Any = sys.modules.get(module)
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
