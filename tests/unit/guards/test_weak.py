"""What is reached by weak references: followed as anything else is, but not kept alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pygraph


class Holder:
    k: Any = 2.0
    last: Any = None

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.k


class Parent(nn.Module):
    """A module whose child refers to it, by a reference that makes no cycle."""

    k: Any = 2.0

    def __init__(self, refer: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.child = Child(refer(self))


class Child(nn.Module):
    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.parent = parent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parent = self.parent() if isinstance(self.parent, weakref.ReferenceType) else self.parent
        return x * parent.k


def module(refer: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    parent = Parent(refer)
    return parent, parent.child


def reference() -> tuple[Any, Any]:
    holder = Holder()
    ref = weakref.ref(holder)
    return holder, lambda x: x * ref().k  # pyright: ignore[reportOptionalMemberAccess]


def proxy() -> tuple[Any, Any]:
    holder = Holder()
    weakly = weakref.proxy(holder)
    return holder, lambda x: x * weakly.k


def method() -> tuple[Any, Any]:
    holder = Holder()
    weakly = weakref.WeakMethod(holder.times)
    return holder, lambda x: weakly()(x)  # pyright: ignore[reportOptionalCall]


def values() -> tuple[Any, Any]:
    holder = Holder()
    weakly = weakref.WeakValueDictionary({"a": holder})
    return holder, lambda x: x * weakly["a"].k


def members() -> tuple[Any, Any]:
    holder = Holder()
    weakly = weakref.WeakSet([holder])
    return holder, lambda x: x * sum(one.k for one in weakly)


WAYS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a reference": reference, "a proxy": proxy, "a method": method, "a dictionary of values": values, "a set": members,
    "a module's reference": lambda: module(weakref.ref), "a module's proxy": lambda: module(weakref.proxy),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_what_is_reached_is_compared_at_every_call_and_may_go(device: torch.device, way: str, native: bool) -> None:
    holder, fn = WAYS[way]()
    x = torch.ones(3, device=device)
    jitted = pygraph.jit(fn)
    for k in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, x * 5, x * 7, x * 7):
        holder.k = k
        assert torch.equal(jitted(x), x * k)
    assert jitted.explain().to_dict()["fallbacks"] == []
    assert jitted.cache_info().hits >= 4
    left = weakref.ref(holder)
    del holder
    gc.collect()
    assert left() is None
    if way == "a set":
        assert torch.equal(jitted(x), x * 0)
    elif "module" not in way:
        with pytest.raises((ReferenceError, AttributeError, TypeError, KeyError)):
            jitted(x)


@pytest.mark.parametrize("way", ["reference", "proxy"])
def test_what_is_stored_there_is_as_eager_stores_it(device: torch.device, way: str) -> None:
    rows = []
    for transform in (lambda fn: fn, pygraph.jit):
        holder: Any = Holder()
        holder.n = 0
        weakly = weakref.ref(holder) if way == "reference" else weakref.proxy(holder)

        def step(x: torch.Tensor, weakly: Any = weakly) -> torch.Tensor:
            state = weakly() if isinstance(weakly, weakref.ReferenceType) else weakly
            state.n += 1
            state.last = x * state.n
            return x + state.last

        fn = transform(step)
        rows.append([])
        for _ in range(5):
            out = fn(torch.ones(2, device=device))
            rows[-1].append((out.tolist(), holder.n, holder.last.tolist()))
    assert rows[0] == rows[1]


def test_of_a_trainer_only_what_code_names_is_compared(device: torch.device) -> None:
    """One that counts its steps must not have each of them traced."""
    trainer: Any = Holder()
    trainer.steps, trainer.loop = 0, Holder()
    layer: Any = nn.Linear(2, 2).to(device)
    layer.trainer = weakref.proxy(trainer)
    jitted = pygraph.jit(layer)
    x = torch.ones(1, 2, device=device)
    with torch.no_grad():
        for _ in range(20):
            trainer.steps += 1
            trainer.loop.k = trainer.steps
            assert torch.equal(jitted(x), layer(x))
    assert jitted.cache_info().misses == 1


def test_a_tensor_that_is_reached_so_is_not_kept(device: torch.device) -> None:
    tensor = torch.full((3,), 2.0, device=device)
    ref = weakref.ref(tensor)

    def fn(x: torch.Tensor) -> torch.Tensor:
        found = ref()
        return x if found is None else x * found

    jitted = pygraph.jit(fn)
    x = torch.ones(3, device=device)
    for _ in range(3):
        assert torch.equal(jitted(x), x * 2)
    report = jitted.explain().to_dict()
    assert report["fallbacks"] == []
    assert "only a weak reference leads to ref" in report["in_python"][0]  # which is asked before the graph
    del tensor
    assert ref() is None
    assert torch.equal(jitted(x), x)


def test_a_tensor_that_somebody_holds_may_be_found_so(device: torch.device) -> None:
    layer: Any = nn.Linear(2, 2, bias=False).to(device)
    layer.ref = weakref.ref(layer.weight)
    jitted = pygraph.jit(lambda x: layer(x) + layer.ref())
    x = torch.ones(2, 2, device=device)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(jitted(x), layer(x) + layer.weight)
    assert jitted.explain().to_dict()["fallbacks"] == []
