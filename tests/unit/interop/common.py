"""Helpers of the tests of composition: the transforms, functions to put through tracers, and checks of calls."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import pygraph
from pygraph.runtime.devices import driver_for
from tests.property.laws import assert_same_value

TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "devicify": pygraph.devicify,
    "indirect∘devicify": lambda fn: pygraph.indirect(pygraph.devicify(fn)),
    "graphify∘indirect∘devicify": lambda fn: pygraph.graphify(pygraph.indirect(pygraph.devicify(fn))),
    "select∘graphify": lambda fn: pygraph.select(pygraph.graphify(fn)),
    "jit": pygraph.jit,
}

# There, "could not find name in object's mro" of a transformed function that is an object's attribute: an error, as
# for any object with `__get__`, never a wrong result.
OLD_DYNAMO = torch.__version__.startswith("2.11.")


def check_same(got: Any, expected: Any, strides: bool = True) -> None:
    """Check that trees, values, dtypes, shapes and strides are equal, and which tensors require grad."""
    got_leaves, got_tree = pytree.tree_flatten(got)
    leaves, tree = pytree.tree_flatten(expected)
    assert got_tree == tree
    for number, (mine, other) in enumerate(zip(got_leaves, leaves, strict=True)):
        assert_same_value(mine, other, f"leaf {number}", strides)
        if isinstance(other, torch.Tensor):
            assert mine.requires_grad == other.requires_grad, f"leaf {number}"


def check_compiled(function: Any, call: Callable[[], Any], expected: Callable[[], Any]) -> None:
    """Ordinary calls are right, and the second time they find what the first time made."""
    with torch.no_grad():
        check_same(call(), expected())
        before = function.cache_info()
        check_same(call(), expected())
    after = function.cache_info()
    assert (after.misses, after.captures) == (before.misses, before.captures)
    assert after.hits > before.hits


def attempt(run: Callable[[], Any]) -> Any:
    """Call a function; the result, or the type of the error that it raises."""
    try:
        return run()
    except Warning:
        raise
    except Exception as error:
        return type(error)


@dataclasses.dataclass(frozen=True)
class Example:
    """A function to transform, and how a user's function of two tensors calls it.

    Attributes:
        make: Makes the function, or the module, on a device.
        call: What the user's function does with it: ``call(function, x, y)``.
        options: How it is jitted.
    """

    make: Callable[[torch.device], Any]
    call: Callable[[Any, torch.Tensor, torch.Tensor], Any] = lambda fn, x, y: fn(x, y) * 2
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def pair(self, device: torch.device) -> tuple[Any, Any]:
        """The function, jitted and as it is."""
        fn = self.make(device)
        return pygraph.jit(fn, **self.options), fn

    def user(self, fn: Any) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        """A user's function that calls ``fn``."""
        return lambda x, y: self.call(fn, x, y)


def arguments(device: torch.device, seed: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 4, generator=generator), torch.randn(4, generator=generator)
    return x.to(device), y.to(device)


def _tensors(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sin() + x.mean()


def _keywords(x: torch.Tensor, y: torch.Tensor | None = None, *, k: float = 2.0, **more: torch.Tensor) -> torch.Tensor:
    return x * k + (more["z"] if y is None else y)


def _tree(tree: dict[str, Any]) -> dict[str, Any]:
    first, (second,) = tree["pair"]
    return {"sum": first + second, "rest": [first.relu(), (second * tree["k"],)], "none": None}


def _static(x: torch.Tensor, mode: str, power: int) -> torch.Tensor:
    return (x.relu() if mode == "relu" else x.cos()) ** power


def _in_place(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.add_(y)
    return x, x * y


def _views(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.t(), x[1:], y, (x > 0).sum()


def _closure(device: torch.device) -> Any:
    weight, other = arguments(device, 7)
    return lambda x, y: x @ weight.t() @ other.expand(3, 4) + y


def _over_module(device: torch.device) -> Any:
    model = _model(device)
    return lambda x, y: model(x) + y


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("shift", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.relu(self.norm(self.first(x))) * scale + self.shift


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return _Net().requires_grad_(False).to(device)


class Scaled:
    """An object whose method is jitted."""

    def __init__(self, device: torch.device) -> None:
        self.scale = arguments(device, 3)[1]

    def times(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * self.scale + y


def _gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: (x.sin() * y).sum())(x)


EXAMPLES: dict[str, Example] = {
    "tensors": Example(lambda device: _tensors),
    "keywords": Example(lambda device: _keywords, lambda fn, x, y: fn(x, z=y, k=0.5) + fn(x, y) + fn(x, y=y)),
    "a tree": Example(lambda device: _tree, lambda fn, x, y: fn({"pair": (x, [y]), "k": 3})),
    "static arguments": Example(
        lambda device: _static,
        lambda fn, x, y: fn(x, "relu", power=3) + fn(y, "cos", power=2),
        {"static_argnums": 1, "static_argnames": "power"},
    ),
    "donated": Example(lambda device: _tensors, lambda fn, x, y: fn(x + 1, y), {"donate_argnums": 0}),
    "reused memory": Example(lambda device: _tensors, options={"reuse_outputs": True}),
    "a closure over tensors": Example(_closure),
    "a closure over a module": Example(_over_module),
    "a module": Example(_model, lambda fn, x, y: fn(x, scale=2.0) + fn(y)),
    "a method": Example(lambda device: Scaled(device).times),
    "in place": Example(lambda device: _in_place, lambda fn, x, y: fn(x.clone(), y)),
    "views": Example(lambda device: _views, lambda fn, x, y: fn(x, y)),
    "a transform inside": Example(lambda device: _gradients),
    "a jitted function inside": Example(lambda device: pygraph.jit(_tensors), options={"max_graphs": 3}),
}


_tracing = importlib.import_module("pygraph.tracing.specialization")


class Work:
    """Counts of pygraph's work in a stretch of a test: functions that ran to be traced, captures, and replays."""

    def __init__(self) -> None:
        self.traces = self.captures = self.replays = 0


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[Work]:
    """Count the work that is done inside."""
    driver, record = driver_for(device), _tracing.record
    assert driver is not None
    work = Work()
    captures, replays = driver.counters.captures, driver.counters.replays

    def recording(*args: Any, **kwargs: Any) -> Any:
        work.traces += 1
        return record(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(_tracing, "record", recording)
        yield work
    work.captures = driver.counters.captures - captures
    work.replays = driver.counters.replays - replays
