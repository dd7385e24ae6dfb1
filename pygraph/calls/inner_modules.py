"""The modules that a function calls which runs as it is: each of them is a graph of its own, where it can be.

    f, as it is              f, as it is
      encoder(x)       ─▶      graph of encoder
      .cpu().numpy()           .cpu().numpy()
      head(y)                  graph of head

What stands in the way of a graph of the function stands in its own lines, most of the time, and not in those of all
modules that it calls. Of modules inside of each other, the outermost that can be a graph is one.
"""

# Functions here are of any type; an engine is part of what it is made from.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary  # checked with torch 2.11 and 2.13

from pygraph.calls import limits, surroundings
from pygraph.calls.retries import Budget, clock
from pygraph.process.module_calls import Serving, call
from pygraph.process.reentrancy import here
from pygraph.runtime.saved_memory import has_saved_tensors_hooks
from pygraph.tracing.function_kinds import Renaming


class Inner:
    """A module, a function or a part inside of a function: a graph, unless each of its calls is compiled anew.

    Args:
        engine: Its engine.
        wasted: Calls in a row that may be compiled, before the time must allow it.
    """

    def __init__(self, engine: Any, wasted: int) -> None:
        self.engine = engine
        self._budget = Budget(wasted, limits.LIMITS.trace_share)

    def may_serve(self) -> bool:
        """Whether a call may go to the engine now."""
        return self._budget.allows()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call by the engine; as it is where the time does not allow that."""
        if not self._budget.allows():
            return self.engine.function.as_it_is(*args, **kwargs)
        counts, begin = self.engine.shared.counts, clock()
        before = counts.traces
        result = self.engine(*args, **kwargs)
        if counts.traces == before:
            self._budget.renew()
        else:
            self._budget.lose(clock() - begin)
        return result


class _Seen:
    """In how many calls a module or a function has come."""

    calls = last = 0

    def note(self, call: int) -> None:
        """Note that it has come in a call, by its number from one on."""
        self.calls += call != self.last
        self.last = call


class InnerModules:
    """The modules that one function and those derived from it call where they run as they are.

    Functions are among them in which a trace has failed, so that they are cut where that was.

    Args:
        function: The engine of that one function.

    Attributes:
        calls: The number of such calls so far.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._found: Any = WeakIdKeyDictionary()  # by owner and code: what runs it, or the calls that it came in
        self._count = 0
        self.calls = 0

    def serve(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call of a module."""
        # Where tensors that are saved are packed, what runs again for them must save as many.
        if here.inside or has_saved_tensors_hooks() or surroundings.inline_reason() is not None:
            return call(module, args, kwargs)
        inner = self._inner(module, module, None) if may_be_graph(module) else None
        if inner is not None and inner.may_serve():
            return inner(*args, **kwargs)
        if _is_torchs(module) or next(module.children(), None) is None:
            return call(module, args, kwargs)
        with Serving(self):
            return call(module, args, kwargs)

    def picked(self, fn: Any) -> Any:
        """Find what is to be called instead of a function or a method."""
        owner, plain = getattr(fn, "__self__", fn), getattr(fn, "__func__", fn)
        if f"{plain.__module__}.".startswith("torch."):  # whose statements are no places to cut
            return fn
        try:
            return self._inner(owner, fn, plain.__code__) or fn
        except TypeError:  # of an instance that cannot be referred to weakly
            return fn

    def _inner(self, owner: Any, fn: Any, code: types.CodeType | None) -> Inner | None:
        """Find what runs a function, once it has come in some calls: the first ones are often unlike all others.

        Args:
            owner: The module, the function, or the instance that a method is of.
            fn: The function.
            code: Its code; None for a module.
        """
        found = self._found.get(owner)
        if found is None:
            found = self._found[owner] = {}
        inner = found.setdefault(code, _Seen())
        if type(inner) is Inner:
            return inner
        inner.note(self.calls)
        if inner.calls <= limits.LIMITS.calls_of_inner or self._count >= limits.LIMITS.inner_modules:
            return None
        self._count += 1
        wasted = limits.LIMITS.wasted_of_modules if code is None else limits.LIMITS.wasted_of_functions
        found[code] = inner = Inner(self._function.derive(fn, self._function.policy.of_inner()), wasted)
        return inner

    def engines(self) -> Iterator[Any]:
        """The engines of modules and of functions."""
        every = (inner for found in list(self._found.values()) for inner in list(found.values()))
        return (inner.engine for inner in every if type(inner) is Inner)

    def clear(self) -> None:
        """Forget all of them, and give back their graphs."""
        for engine in self.engines():
            engine.release()
        self._found.clear()
        self._count = 0


class WithModules:
    """Runs a function as it is, and the modules that it calls by their graphs.

    Args:
        fn: The function.
        modules: The modules that it calls.
    """

    def __init__(self, fn: Callable[..., Any], modules: InnerModules) -> None:
        self._fn, self._modules = fn, modules
        self._own = _module_of(fn)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        if self._own is not None and _is_torchs(self._own):  # which knows what it does with the one inside
            return self._fn(*args, **kwargs)
        self._modules.calls += 1
        with Serving(self._modules, self._own):
            return self._fn(*args, **kwargs)


def _module_of(fn: Any) -> torch.nn.Module | None:
    """The module that a function is, or that it is made from, as one of objects that are taken apart."""
    while isinstance(fn, Renaming):
        fn = getattr(fn, "__wrapped__", None)
    return fn if isinstance(fn, torch.nn.Module) else None


def may_be_graph(module: torch.nn.Module) -> bool:
    """Whether a graph of a module may be of use: torch's own layers, which have no others inside, are few kernels."""
    if _is_torchs(module) or isinstance(module, torch.jit.ScriptModule):
        return False
    return not _is_of(module, "torch.nn.modules") or next(module.children(), None) is not None


def _is_torchs(module: torch.nn.Module) -> bool:
    """Whether a module is one of torch's that calls others in its own way, as `DistributedDataParallel`."""
    return _is_of(module, "torch") and not _is_of(module, "torch.nn.modules")


def _is_of(module: torch.nn.Module, package: str) -> bool:
    return f"{type(module).__module__}.".startswith(f"{package}.")
