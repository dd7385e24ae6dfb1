"""Containers and objects that a function returns: the very same if they were there before the call, as in eager."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from tests.described import check

pytestmark = pytest.mark.usefixtures("native")


def tensors(device: torch.device) -> list[Tensor]:
    return [torch.full((3,), float(i), device=device) for i in range(4)]


RETURNED: dict[str, Callable[[Tensor, Any], Any]] = {
    "list": lambda x, a: (x * 2, a["list"]),
    "dict": lambda x, a: {"y": x + 1, "a": a},
    "inner and outer": lambda x, a: (x * 2, a, a["list"]),
    "deque": lambda x, a: [a["deque"], x * 2],
    "changed": lambda x, a: (a["list"].append(x * 2), a["list"], a),
    "stored": lambda x, a: (a.update(other=a["list"]), x * 2),
}


@pytest.mark.parametrize("name", RETURNED)
def test_of_arguments(device: torch.device, name: str) -> None:
    made = tensors(device)
    fast = check(
        RETURNED[name],
        lambda: [(x, {"list": [x, 2.0], "deque": collections.deque([x], maxlen=3)}) for x in made],
    )
    assert (fast.cache_info().captures, fast.cache_info().hits) == (1, 3)


def test_that_are_closed_over(device: torch.device) -> None:
    kept = {"scale": torch.ones(3, device=device), "list": [1]}
    fast = pygraph.jit(lambda x: (x * kept["scale"], kept, kept["list"]))
    for x in tensors(device):
        result = fast(x)
        torch.testing.assert_close(result[0], x)
        assert result[1] is kept
        assert result[2] is kept["list"]
    assert fast.cache_info().hits == 3


def test_of_modules(device: torch.device) -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.cache: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Any:
            self.seen.append(x.sum())
            self.cache["x"] = x * 2
            self.last = {"x": x + 1}
            return x * 2, self.seen, self.cache, self.last

    memory = Memory()
    fast = pygraph.jit(memory)
    for count, x in enumerate(tensors(device), 1):
        _, seen, cache, last = fast(x)
        assert seen is memory.seen
        assert cache is memory.cache
        assert last is memory.last
        assert len(seen) == count
        torch.testing.assert_close((cache["x"], last["x"]), (x * 2, x + 1))


def test_in_two_places(device: torch.device) -> None:
    def function(x: Tensor) -> Any:
        made = [x * 2]
        return made, {"again": made}

    fast = pygraph.jit(function)
    for x in tensors(device):
        one, other = fast(x)
        assert one is other["again"]


@pytest.mark.parametrize("is_passed", [False, True])
def test_next_to_what_requires_grad(device: torch.device, is_passed: bool) -> None:
    weight = torch.ones(3, device=device, requires_grad=True)
    kept: list[float] = [2.0]
    fast = pygraph.jit((lambda x, a: (x * weight, a)) if is_passed else (lambda x: (x * weight, kept)))
    for x in tensors(device):
        given = [1.0]
        y, found = fast(x, given) if is_passed else fast(x)
        assert found is (given if is_passed else kept)
        weight.grad = None
        y.sum().backward()
        torch.testing.assert_close(weight.grad, x)


def test_of_a_module_in_a_function_that_is_cut(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, cache: dict[str, Any]) -> Any:
            return x * 2 + cache["b"], cache

    net = Net()

    def function(x: Tensor, cache: dict[str, Any]) -> Any:
        y, found = net(x, cache)
        print("cut")
        found["n"] = found.get("n", 0) + 1
        return y, cache["n"]

    fast = pygraph.jit(function)
    for x in tensors(device):
        assert fast(x, {"b": x})[1] == 1


def test_keyword_arguments_that_are_changed_between_parts(device: torch.device) -> None:
    def function(x: Tensor, *args: float, scale: int = 2, **others: Any) -> Any:
        count = others.pop("count", 1)
        y = x * scale
        print(end="")
        others["last"] = 3
        z = (y + count).relu()
        print(end="")
        return z * args[0], others

    check(function, lambda: [(x, 2.0, 3.0) for x in tensors(device)])
    fast = pygraph.jit(function)
    for x in tensors(device):
        given = {"count": 2, "k": x}
        found, expected = fast(x, 1.0, scale=3, **given), function(x, 1.0, scale=3, **given)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1:] == expected[1:]
        assert set(given) == {"count", "k"}
    assert fast.cache_info().captures > 0


class Record:
    """An object that is nothing but its attributes."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.count = value, 0


def returned(x: Tensor, kept: Any) -> Any:
    kept.record.value = x + 1
    return kept.record


def returned_inside(x: Tensor, kept: Any) -> Any:
    kept.record.value = x * 2
    kept.record.count += 1
    return {"old": kept.record, "new": Record(x * 3)}, kept


def stored(x: Tensor, kept: Any) -> Any:
    kept.records[1].value = x.sin()
    kept.log.append(kept.records[1])
    return x + 1


def stored_argument(x: Tensor, kept: Any, record: Record) -> Any:
    record.value = x + 3
    kept.log.append(record)
    return record


@pytest.mark.parametrize("fn", [returned, returned_inside, stored, stored_argument])
def test_objects_in_which_a_call_stores_tensors(device: torch.device, fn: Callable[..., Any]) -> None:
    def make(run: Callable[..., Any]) -> list[Any]:
        kept = types.SimpleNamespace(record=Record(torch.zeros(3, device=device)), log=[])
        kept.records = [kept.record, Record(torch.zeros(3, device=device))]
        passed = [Record(torch.zeros(3, device=device))] if fn is stored_argument else []
        call = run(lambda x: fn(x, kept, *passed))
        results = [(call(x), kept) for x in [*tensors(device), *tensors(device)]]
        old = [(one["old"], one["new"]) for (one, _), _ in results] if fn is returned_inside else []
        if old:
            assert all(one is kept.record for one, _ in old)
            assert len({id(new) for _, new in old}) == len(old)
        known = [id(kept), *map(id, kept.records), *map(id, passed)]
        shown = [known.index(id(one)) if id(one) in known else None for one, _ in results]
        return [shown, [known.index(id(one)) for one in kept.log], [[*vars(one).values()] for one in kept.records]]

    mine, expected = make(pygraph.jit), make(lambda call: call)
    torch.testing.assert_close(mine, expected)
