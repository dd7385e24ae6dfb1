"""A transformed ``nn.Module``: a module that shares all state with the one it was made from."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx._symbolic_trace import is_fx_symbolic_tracing  # checked with torch 2.11 and 2.13

from pygraph.api.functions import check_function, check_parameters
from pygraph.api.programs import ProgramFunction
from pygraph.autograd.composition import Composed
from pygraph.calls.cache import CacheInfo
from pygraph.calls.options import Options
from pygraph.calls.stages import Lowered
from pygraph.calls.transformed import Transformed
from pygraph.ir.program import Program
from pygraph.report.explain import Explanation
from pygraph.transforms.passes import Pass


class TransformedModule(torch.nn.Module):
    """An ``nn.Module`` whose calls run as graphs.

    Parameters, buffers, submodules, hooks and the training flag are those of the original: both see every change of
    either, and ``state_dict`` has the same keys. Other attributes and methods are looked up on the original,
    and so are lengths, items and iteration, if its class has them.
    """

    __slots__ = ("_pygraph_module", "_pygraph_transformed")
    _pygraph_module: torch.nn.Module
    _pygraph_transformed: Transformed[..., Any]

    def __init__(self, module: torch.nn.Module, transformed: Transformed[..., Any]) -> None:
        object.__setattr__(self, "__dict__", module.__dict__)
        object.__setattr__(self, "_pygraph_module", module)
        object.__setattr__(self, "_pygraph_transformed", transformed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, hooks included."""
        if is_fx_symbolic_tracing():  # which finds a module by its place in the root, and may keep it as one node
            return super().__call__(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._pygraph_module(*args, **kwargs)
        return self._pygraph_transformed(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward as a graph."""
        if "forward" in self.__dict__:  # the module calls what lies there, which calls this, the forward of before
            return type(self._pygraph_module).forward(self._pygraph_module, *args, **kwargs)
        if is_fx_symbolic_tracing():
            return self._pygraph_module.forward(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._pygraph_module(*args, **kwargs)
        return self._pygraph_transformed(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's own calls, as its ``compile`` does: compiled calls of this one would call each other."""
        self._pygraph_module.compile(*args, **kwargs)  # pyright: ignore[reportUnknownMemberType]

    def cache_info(self) -> CacheInfo:
        """As of a transformed function."""
        return self._pygraph_transformed.cache_info()

    def cache_clear(self) -> None:
        """As of a transformed function."""
        self._pygraph_transformed.cache_clear()

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As of a transformed function."""
        return self._pygraph_transformed.lower(*args, **kwargs)

    def explain(self, *, profile: bool = False) -> Explanation:
        """As of a transformed function."""
        return self._pygraph_transformed.explain(profile=profile)

    def explain_misses(self) -> str:
        """As of a transformed function."""
        return self._pygraph_transformed.explain_misses()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_pygraph"):
                raise
            return getattr(self._pygraph_module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._pygraph_module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._pygraph_module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._pygraph_module)})

    def __reduce__(self) -> tuple[Any, ...]:
        # For pickles: the module goes along, what was compiled for it does not.
        function = self._pygraph_transformed
        return transformed, (self._pygraph_module, function.passes, function.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformedModule:
        function = self._pygraph_transformed
        return transformed(copy.deepcopy(self._pygraph_module, memo), function.passes, function.options)

    def __repr__(self) -> str:
        return f"pygraph {self._pygraph_module!r}"


def transformed(fn: Any, passes: tuple[Pass, ...], options: Options, transform: str = "jit") -> Any:
    """A transformed function, or for a module a module around one.

    Args:
        fn: A function, a module, or a Program.
        passes: The passes of its stack.
        options: The options of the stack.
        transform: The name of what the user has called.

    Raises:
        ArgumentError: It is none of these, or an option names an argument that it does not have.
    """
    if isinstance(fn, Program):
        fn = ProgramFunction(fn)
    check_function(transform, fn)
    check_parameters(transform, fn, options)
    function = Transformed(fn, passes, options, Composed)
    if isinstance(fn, torch.nn.Module):
        present = tuple(name for name in _CONTAINERS if getattr(type(fn), name, None) is not None)
        return _class_with(present)(fn, function)
    return function


# Python looks these up on the class; a class has them only if the module's does, as bool() asks for a length.
_CONTAINERS = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__", "__contains__")


@functools.cache
def _class_with(methods: tuple[str, ...]) -> type[TransformedModule]:
    """The class of transformed modules that have these methods of containers, as ``nn.Sequential`` has."""
    if not methods:
        return TransformedModule
    forwarding = {name: _forwarding(name) for name in methods}
    namespace = {"__slots__": (), "__module__": __name__, "__doc__": TransformedModule.__doc__, **forwarding}
    return type(TransformedModule.__name__, (TransformedModule,), namespace)


def _forwarding(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(self._pygraph_module, name)(*args)

    method.__name__ = name
    return method


def transformed_behind(fn: Any) -> Transformed[..., Any] | None:
    """The transformed function that something is, or that a transformed module calls; None if it is neither."""
    inner: Any = getattr(fn, "_pygraph_transformed", fn) if isinstance(fn, torch.nn.Module) else fn
    return inner if isinstance(inner, Transformed) else None  # pyright: ignore[reportUnknownVariableType]
