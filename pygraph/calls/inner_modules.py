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

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary  # checked with torch 2.11 and 2.13

from pygraph.calls import limits, surroundings
from pygraph.process.module_calls import Serving, call
from pygraph.process.reentrancy import here

MakeEngine = Callable[[torch.nn.Module], Any]
"""Makes the engine of a module."""


class InnerModules:
    """The modules that one function and those derived from it call where they run as they are.

    Args:
        make: Makes the engine of a module.

    Attributes:
        calls: The number of such calls so far.
    """

    def __init__(self, make: MakeEngine) -> None:
        self._make = make
        self._engines: Any = WeakIdKeyDictionary()  # by module; None for those that are to be no graphs
        self._seen: Any = WeakIdKeyDictionary()  # the others, and the number of the call that they were seen in
        self.calls = 0

    def serve(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call of a module."""
        if here.inside or surroundings.inline_reason() is not None:
            return call(module, args, kwargs)
        engine = self._engines.get(module) or self._new_engine(module)
        if engine is not None:
            return engine(*args, **kwargs)
        if _is_torchs(module) or next(module.children(), None) is None:
            return call(module, args, kwargs)
        with Serving(self):
            return call(module, args, kwargs)

    def _new_engine(self, module: torch.nn.Module) -> Any:
        """The engine of a module, once a second call has come to it: what is made for one call would be of no use."""
        if module in self._engines:
            return None
        if not may_be_graph(module) or len(self._engines) >= limits.LIMITS.inner_modules:
            self._engines[module] = None
        elif self._seen.setdefault(module, self.calls) != self.calls:
            self._engines[module] = self._make(module)
        return self._engines.get(module)

    def engines(self) -> Iterator[Any]:
        """The engines of modules."""
        return (engine for engine in list(self._engines.values()) if engine is not None)

    def clear(self) -> None:
        """Forget all modules, and give back their graphs."""
        for engine in self.engines():
            engine.release()
        self._engines.clear()
        self._seen.clear()


class WithModules:
    """Runs a function as it is, and the modules that it calls by their graphs.

    Args:
        fn: The function.
        modules: The modules that it calls.
    """

    def __init__(self, fn: Callable[..., Any], modules: InnerModules) -> None:
        self._fn, self._modules = fn, modules
        self._own = fn if isinstance(fn, torch.nn.Module) else None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        self._modules.calls += 1
        with Serving(self._modules, self._own):
            return self._fn(*args, **kwargs)


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
