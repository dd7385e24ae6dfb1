"""In what calls that were compiled are unlike those before."""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import pygraph

SCALE = 2.0


def cut(x: Tensor, length: int, name: str = "a", **others: Tensor) -> Tensor:
    return x[:length] * SCALE


Calls = Callable[[Any, Tensor], object]

CALLS: dict[str, tuple[Calls, str]] = {
    "value": (lambda fast, x: fast(x, 3), "args[1] is 3 and was 2"),
    "dtype": (lambda fast, x: fast(x.double(), 2), "args[0] has dtype torch.float64, was torch.float32"),
    "shape": (lambda fast, x: fast(x[:6], 2), "args[0] has shape (6, 4), was (9, 4)"),
    "strides": (lambda fast, x: fast(x.t().contiguous().t(), 2), "args[0] has strides (1, 9), was (4, 1)"),
    "static": (lambda fast, x: fast(x, 2, "b"), "args is a tuple of 3 and was a tuple of 2"),
    "type": (lambda fast, x: fast(x, True), "args[1] is True and was an int"),
    "structure": (lambda fast, x: fast(x, 2, other=x), "kwargs is a dict of 'other' and was an empty dict"),
    "gradients": (lambda fast, x: no_grad(fast, x), "grad mode is another setting"),
}


def no_grad(fast: Any, x: Tensor) -> None:
    with torch.no_grad():
        fast(x, 2)


def lines(fast: Any) -> list[str]:
    return fast.explain_misses().splitlines()


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_is_unlike_the_one_before(device: torch.device, kind: str) -> None:
    call, told = CALLS[kind]
    fast, x = pygraph.jit(cut), torch.ones(9, 4, device=device)
    fast(x, 2)
    fast(x, 2)
    call(fast, x)
    first, second = lines(fast)
    assert re.fullmatch(
        r"cut: miss 1 \(test_misses.py:\d+\): the first call; recorded as 1 graph, in \d+.\d\d s", first
    )
    assert f": {told}; " in second


STRUCTURES: dict[str, tuple[Any, Any, str]] = {
    "a key more": ({"a": 1.0}, {"a": 1.0, "b": 2.0}, "args[0] is a dict of 'a', 'b' and was a dict of 'a'"),
    "inside": ({"a": [1.0]}, {"a": [1.0, 2.0]}, "args[0]['a'] is a list of 2 and was a list of 1"),
    "another class": ([1.0], (1.0,), "args[0] is a tuple of 1 and was a list of 1"),
    "a leaf before": ([1.0], [[1.0]], "args[0][0] is a list of 1 and was a float"),
    "a leaf now": ({"a": [1.0]}, {"a": 1.0}, "args[0]['a'] is a float and was a list of 1"),
    "empty": ([1.0], [], "args[0] is an empty list and was a list of 1"),
    "the first of two": ([[], []], [[1.0], [1.0]], "args[0][0] is a list of 1 and was an empty list"),
    "many keys": (
        dict.fromkeys("abcdef", 1.0), dict.fromkeys("abcdez", 1.0),
        "args[0] is a dict of 'z', 'a', 'b', 'c' and 2 more and was a dict of 'f', 'a', 'b', 'c' and 2 more",
    ),
    "the order": (
        {"a": 1.0, "b": 1.0}, {"b": 1.0, "a": 1.0}, "args[0] is a dict of 'b', 'a' and was a dict of 'a', 'b'",
    ),
    "a default": (
        defaultdict(int, a=1.0), defaultdict(list, a=1.0), "args[0] is of another kind, a defaultdict of 'a'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRUCTURES)
def test_the_first_container_that_is_another_one(device: torch.device, kind: str) -> None:
    before, now, told = STRUCTURES[kind]
    fast, x = pygraph.jit(lambda tree, x: x * 2), torch.ones(2, device=device)
    fast(before, x)
    fast(now, x)
    assert f": {told}; " in lines(fast)[-1]


class Tagged:
    """A container that says something of itself."""

    def __init__(self, item: Tensor, tag: str) -> None:
        self.item, self.tag = item, tag


pytree.register_pytree_node(Tagged, lambda one: ([one.item], one.tag), lambda parts, tag: Tagged(*parts, tag))


def test_a_container_of_a_class_of_the_user_s(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda tagged: tagged.item * 2), torch.ones(2, device=device)
    for tag in "aba":
        fast(Tagged(x, tag))
    assert [": args[0] is of another kind, a Tagged of 1; " in line for line in lines(fast)] == [False, True]


TREES = st.recursive(
    st.just(1.0), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
)


@given(before=TREES, now=TREES)
@settings(max_examples=40)
def test_what_is_told_of_structures_is_so(before: Any, now: Any) -> None:
    fast, x = pygraph.jit(lambda tree, x: x * 2), torch.ones(2, device=pygraph.default_device())
    fast(before, x)
    fast(now, x)
    if len(lines(fast)) == 1:
        assert pytree.tree_structure(before) == pytree.tree_structure(now)
        return
    told = re.search(r": args\[0\](\S*) is (.*) and was (.*); ", lines(fast)[1])
    assert told is not None
    for tree, text in ((now, told[2]), (before, told[3])):
        found = eval(f"tree{told[1]}", {"tree": tree})
        assert text.startswith(("a ", "an empty "))
        assert type(found).__name__ in text
        if isinstance(found, dict):
            assert "".join(re.findall("'(.)'", text)) == "".join(found)
        elif isinstance(found, list):
            assert text.endswith(f" of {len(found)}") or not found


def decides(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


def goes_on(x: Tensor) -> Tensor:
    while x.sum() < 30:
        x = x * 2
    return x


@pytest.mark.parametrize("function", [decides, goes_on])
def test_a_call_that_decides_otherwise_has_the_same_structure(device: torch.device, function: Any) -> None:
    fast = pygraph.jit(function)
    for value in (1.0, -1.0, 20.0, 3.0, 8.0, 1.0) if function is decides else (9.0, 20.0, 9.0, 20.0):
        x = torch.full((2,), value, device=device)
        torch.testing.assert_close(fast(x), function(x))
    told = fast.explain_misses()
    assert " is a " not in told
    assert "structure" not in told
    assert "by values on the device is " in told


def test_state_has_its_name(device: torch.device) -> None:
    class Keeps(torch.nn.Module):
        kept: tuple[Tensor, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            self.kept = (*self.kept, x * 2) if len(self.kept) < 3 else ()
            return x + 1

    fast, x = pygraph.jit(Keeps()), torch.ones(2, device=device)
    for _ in range(6):
        fast(x)
    assert ": kept is a tuple of 2 and was a tuple of 1; recorded as 1 graph" in fast.explain_misses()


def test_the_most_alike_of_earlier_calls_counts(device: torch.device) -> None:
    fast, x = pygraph.jit(cut), torch.ones(9, 4, device=device)
    fast(x, 2)
    fast(x, 2, other=x)
    fast(x.double(), 2)
    assert "args[0] has dtype torch.float64, was torch.float32;" in lines(fast)[-1]


def test_what_a_function_reads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = pygraph.jit(cut), torch.ones(9, 4, device=device)
    fast(x, 2)
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    assert fast(x, 2)[0, 0] == 3
    assert "SCALE has changed; recorded as 1 graph" in lines(fast)[-1]


def test_what_was_compiled_has_gone(device: torch.device) -> None:
    fast, x = pygraph.jit(cut, max_graphs=1), torch.ones(9, 4, device=device)
    for length in (2, 3, 2):
        fast(x, length)
    assert "what was compiled for such calls is not there any more" in lines(fast)[-1]


def test_derived_functions_and_modules_tell_theirs(device: torch.device) -> None:
    model = torch.nn.Linear(4, 2, device=device)
    fast = pygraph.jit(model)
    fast(torch.ones(3, 4, device=device)).sum().backward()
    assert any(line.startswith("backward(Linear): miss 1") for line in lines(fast))
    assert lines(pygraph.jit(torch.sin)) == []


class Odd:
    """An object without a text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_objects_of_the_user_s_are_not_held(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda x, odd: x * 2, static_argnums=1), torch.ones(2, device=device)
    odd = Odd()
    there = weakref.ref(odd)
    fast(x, odd)
    fast(x, Odd())
    assert "args[1] is another object, a Odd;" in lines(fast)[-1]
    fast.cache_clear()
    del odd
    assert there() is None
    assert len(lines(fast)) == 2


def test_only_the_last_ones_are_remembered(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda x, k: x.numpy(force=True).sum() * k), torch.ones(2, device=device)
    for size in range(1, 80):
        fast(torch.ones(size, device=device), 2)
    assert len(lines(fast)) <= 64
    assert fast(x, 2) == 4
