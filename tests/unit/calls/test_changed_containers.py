"""Calls that change lists, dicts and deques that they are passed: graphs, which leave behind what eager leaves."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pygraph
from pygraph.errors import ContainerChangeError, FallbackError
from pygraph.guards.argument_containers import Change, ContainersBefore, containers_among
from pygraph.process import extension
from tests.described import check, described

pytestmark = pytest.mark.usefixtures("native")

Make = Callable[[int], Tensor]


def maker(device: torch.device) -> Make:
    return lambda seed: torch.randn(4, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.fixture
def make(device: torch.device) -> Make:
    return maker(device)


# ---- functions ------------------------------------------------------------------------------------------------------


def log(x: Tensor, losses: list[Any]) -> Tensor:
    losses.append((x * 2).sum())
    return x + 1


def log_tuples(x: Tensor, past: list[Any]) -> Tensor:
    past.append((x * 2, x.sum(), 3))
    past += [{"k": x.relu()}]
    return x + 1


def log_number(x: Tensor, losses: list[Any]) -> Tensor:
    y = (x * 2).relu() + 1
    losses.append(float(y.sum()))
    return y


def log_by_name(x: Tensor, *, history: dict[str, list[Any]]) -> Tensor:
    history["loss"].append((x * 2).sum())
    return x + 1


def mean_so_far(x: Tensor, losses: list[Any]) -> Tensor:
    losses.append((x * 2).sum())
    return sum(losses) / len(losses)


def ranked(x: Tensor, found: list[Any]) -> Tensor:
    found.append((0.5, x.sum()))
    found.sort(key=lambda pair: pair[0])
    return x * found[0][0]


def metrics(x: Tensor, found: dict[str, Any]) -> Tensor:
    found["loss"] = (x * 2).sum()
    found["steps"] = found.get("steps", 0) + 1
    return x + 1


def cache(x: Tensor, layers: dict[int, Any]) -> Tensor:
    for number, (k, v) in layers.items():
        layers[number] = (k + x, v * x)
    return layers[0][0] + layers[1][1]


def window(x: Tensor, seen: collections.deque[Any]) -> Tensor:
    seen.append(x.sum())
    return torch.stack(list(seen)).mean() * x


def least_recently_used(x: Tensor, memo: collections.OrderedDict[str, Any]) -> Tensor:
    memo["b"] = memo.pop("b")
    memo.move_to_end("a")
    return x * memo["a"] + memo["b"]


def reordered(x: Tensor, memo: dict[str, Any]) -> Tensor:
    memo["a"] = memo.pop("a")
    return x * memo["a"]


def defaults(x: Tensor, groups: Any) -> Tensor:
    groups["new"].append(x * 2)
    groups["old"].append(x * 3)
    return x + len(groups)


def work(x: Tensor, items: list[Any]) -> Tensor:
    while items:
        x = x * items.pop()
    return x


def swap(x: Tensor, pair: list[Any]) -> Tensor:
    pair[0], pair[1] = pair[1], pair[0] + x
    pair.reverse()
    return pair[0] * 2


def adam(grad: Tensor, state: dict[str, Any]) -> Tensor:
    state["step"] += 1
    state["mean"] = state["mean"] * 0.9 + grad * 0.1
    state["square"].mul_(0.99).addcmul_(grad, grad, value=0.01)
    return state["mean"] / (1 - 0.9 ** state["step"]) / state["square"].sqrt().add(1e-8)


def steps(x: Tensor, state: dict[str, Any]) -> Tensor:
    state["step"] += 1
    scale = state["inner"][0]
    scale["scale"] *= 0.5
    if state["step"] % 2 or scale["scale"] < 0.1:
        return x * 0.9 ** state["step"]
    return x[: state["step"]] * scale["scale"]


def linked(x: Tensor, a: list[Any], b: dict[str, Any]) -> Tensor:
    a.append(b)
    b["a"] = a
    return x * 2


def stored_argument(x: Tensor, a: list[Any], b: dict[str, Any]) -> Tensor:
    b["list"] = a
    return x * 2


def returned(x: Tensor, a: list[Any]) -> Any:
    a.append(x * 2)
    return a, x + 1


def decides(x: Tensor, losses: list[Any]) -> Tensor:
    if x.sum() > 0:
        losses.append(x.sum())
    else:
        losses.append(-x.sum())
        losses.append(None)
    return x * 2


@dataclasses.dataclass
class Recorder:
    losses: list[Any]
    by_name: dict[str, list[Any]]


def recorded(x: Tensor, recorder: Recorder) -> Tensor:
    recorder.losses.append((x * 2).sum())
    recorder.by_name["x"].append(x.relu())
    return x + 1


class Case(NamedTuple):
    """A function, what makes its further arguments, and how many graphs six calls record; and hits, if it is cut.

    With ``kept``, all calls are passed the same containers, else each is passed new ones.
    """

    function: Callable[..., Any]
    containers: Callable[[Make], tuple[Any, ...]]
    captures: int = 1
    kept: bool = True
    hits: int | None = None


CASES = {
    "log": Case(log, lambda make: ([],)),
    "new logs": Case(log, lambda make: ([],), kept=False),
    "logs of all lengths": Case(log, lambda make: ([1.0] * 3,)),
    "tuples": Case(log_tuples, lambda make: ([],)),
    "numbers": Case(log_number, lambda make: ([],), hits=4),
    "ranked": Case(ranked, lambda make: ([(1.0, make(1))],), 2, kept=False),
    "metrics": Case(metrics, lambda make: ({},), 2),
    "new metrics": Case(metrics, lambda make: ({},), kept=False),
    "cache": Case(cache, lambda make: ({0: (make(1), make(2)), 1: (make(3), make(4))},)),
    "window": Case(window, lambda make: (collections.deque([make(1).sum()], maxlen=2),), 2),
    "new windows": Case(window, lambda make: (collections.deque([make(1).sum()], maxlen=2),), kept=False),
    "least recently used": Case(least_recently_used, lambda make: (collections.OrderedDict(a=make(1), b=make(2)),), 2),
    "reordered": Case(reordered, lambda make: ({"a": make(1), "b": make(2)},), 2),
    "defaults": Case(defaults, lambda make: (collections.defaultdict(list, old=[]),), 2),
    "work": Case(work, lambda make: ([make(1), 2.0, make(3)],), kept=False),
    "swap": Case(swap, lambda make: ([make(1), make(2)],)),
    "adam": Case(adam, lambda make: ({"step": 0, "mean": make(1), "square": make(2).abs()},), 2),
    "steps": Case(steps, lambda make: ({"step": 0, "inner": [{"scale": 2.0}]},), 4, hits=1),  # a size and two ways
    "linked": Case(linked, lambda make: ([], {}), kept=False),
    "stored argument": Case(stored_argument, lambda make: ([make(1)], {}), kept=False),
    "returned": Case(returned, lambda make: ([],)),
    "decides": Case(decides, lambda make: ([],), 3),
    "in an object": Case(recorded, lambda make: (Recorder([], {"x": []}),)),
    "in new objects": Case(recorded, lambda make: (Recorder([], {"x": []}),), kept=False),
}


def calls_of(case: Case, make: Make, count: int = 6) -> list[tuple[Any, ...]]:
    kept = case.containers(make)
    return [(make(i) - (i % 2), *(kept if case.kept else case.containers(make))) for i in range(count)]


@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(make: Make, name: str) -> None:
    case = CASES[name]
    fast = check(case.function, lambda: calls_of(case, make))
    info = fast.cache_info()
    assert info.captures == case.captures
    assert info.hits >= (6 - case.captures if case.hits is None else case.hits)


def test_of_keyword_arguments(make: Make) -> None:
    mine: dict[str, list[Any]] = {"loss": []}
    theirs: dict[str, list[Any]] = {"loss": []}
    losses, fast = mine["loss"], pygraph.jit(log_by_name)
    for i in range(4):
        torch.testing.assert_close(fast(make(i), history=mine), log_by_name(make(i), history=theirs))
    assert mine["loss"] is losses
    assert described(mine) == described(theirs)
    assert fast.cache_info().captures == 1


def test_lists_that_are_read_are_passed_by_their_items(make: Make) -> None:
    check(mean_so_far, lambda: calls_of(Case(mean_so_far, lambda make: ([],)), make))
    fast = check(mean_so_far, lambda: calls_of(Case(mean_so_far, lambda make: ([make(7).sum()],), kept=False), make))
    assert fast.cache_info().captures == 1


def test_a_step_of_training_with_a_log(device: torch.device, make: Make) -> None:
    def steps(jitted: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x: Tensor, losses: list[Any], norms: list[Any]) -> None:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            norms.append(loss.item())

        run = pygraph.jit(step) if jitted else step
        losses, norms = [], []
        for i in range(8):
            run(make(i), losses, norms)
        return run, [losses, norms, list(model.parameters())]

    fast, found = steps(True)
    _, expected = steps(False)
    torch.testing.assert_close(found, expected)
    assert fast.cache_info().hits >= 4


def test_gradients_go_through_what_is_stored(make: Make) -> None:
    def function(x: Tensor, found: dict[str, Tensor]) -> Tensor:
        found["twice"] = x * 2
        return (x * 3).sum()

    fast = pygraph.jit(function)
    for i in range(4):
        x, found = make(i).requires_grad_(), dict[str, Tensor]()
        (fast(x, found) + found["twice"].sum()).backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 5.0))


def test_results_of_earlier_calls_stay_as_they_are(make: Make) -> None:
    fast, losses = pygraph.jit(log), list[Tensor]()
    for i in range(6):
        fast(make(i), losses)
    torch.testing.assert_close(losses, [(make(i) * 2).sum() for i in range(6)])


# ---- what is not taken apart -----------------------------------------------------------------------------------------


def test_a_list_that_the_function_reaches_otherwise(make: Make) -> None:
    kept: list[Any] = []

    def function(x: Tensor, losses: list[Any]) -> Tensor:
        losses.append(x.sum())
        return x * len(kept)

    fast = pygraph.jit(function)
    for i in range(4):
        torch.testing.assert_close(fast(make(i), kept), make(i) * (i + 1))
    assert len(kept) == 4


def test_one_list_in_two_places(make: Make) -> None:
    def function(x: Tensor, a: list[Any], b: list[Any]) -> Tensor:
        a.append(x * 2)
        return x * len(b)

    fast = pygraph.jit(function)
    for i in range(4):
        one: list[Any] = [1]
        torch.testing.assert_close(fast(make(i), one, one), make(i) * 2)
        other: list[Any] = [1]
        torch.testing.assert_close(fast(make(i), one, other), make(i))
        assert (len(one), len(other)) == (3, 1)


def test_numbers_in_a_dict_of_a_users_class(make: Make) -> None:
    class Sample(dict[str, Any]):
        pass

    def function(sample: Sample) -> Tensor:
        return sample["x"] * 0.9 ** sample["n"] if sample["n"] > 2 else sample["x"] + 0.9 ** sample["n"]

    fast = check(function, lambda: [(Sample(x=make(i), n=i),) for i in range(8)])
    assert fast.cache_info().captures <= 3


def test_a_list_that_is_stored_twice_is_one(make: Make) -> None:
    def function(x: Tensor, a: dict[str, Any]) -> Any:
        a["x"] = a["y"] = [x * 2]
        return x + 1

    fast = pygraph.jit(function)
    for i in range(3):
        found: dict[str, Any] = {}
        fast(make(i), found)
        assert found["x"] is found["y"]


def test_a_list_that_is_stored_and_returned_is_one(make: Make) -> None:
    def function(x: Tensor, a: dict[str, Any]) -> Any:
        a["x"] = [x * 2]
        return a["x"]

    fast = pygraph.jit(function)
    for i in range(3):
        found: dict[str, Any] = {}
        assert fast(make(i), found) is found["x"]


def test_what_is_no_tensor_is_stored_as_it_is(make: Make) -> None:
    marker = object()

    def function(x: Tensor, a: list[Any]) -> Tensor:
        a.append(marker)
        return x * 2

    fast, found = pygraph.jit(function), list[Any]()
    for i in range(3):
        torch.testing.assert_close(fast(make(i), found), make(i) * 2)
    assert found == [marker] * 3


def test_a_trace_says_what_changes(make: Make) -> None:
    with pytest.raises(
        ContainerChangeError, match=r"it changes args\[1\], which it is passed. Return a new one."
    ) as at:
        pygraph.trace(log)(make(1), [])
    assert at.value.containers == {"args[1]": Change.GROWS}
    with pytest.raises(FallbackError, match="changes"):
        pygraph.jit(lambda x, a: a.append(object()), strict=True)(make(1), [])


def test_names_and_changes() -> None:
    class Pair(NamedTuple):
        left: list[int]
        right: dict[str, list[int]]

    args, kwargs = (Pair([1], {"a": [2]}), [{}, 3]), {"key": collections.deque([4])}
    before = ContainersBefore(args, kwargs)
    names = [name for name, _ in containers_among(args, kwargs)]
    assert names == ["args[0].left", "args[0].right", "args[0].right['a']", "args[1]", "args[1][0]", "kwargs['key']"]
    assert before.changed() == {}
    args[0].left.append(2)
    args[0].right["a"] = [2]
    args[1][1] = 3
    kwargs["key"].append(5)
    assert before.changed() == {
        "args[0].left": Change.GROWS, "args[0].right": Change.CHANGES, "kwargs['key']": Change.CHANGES
    }  # fmt: skip


# ---- any history -----------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Tensor, Any, Any], Any]] = {
    "append": lambda x, a, b: a.append(x * 2),
    "extend": lambda x, a, b: a.extend([x, (x + 1, 2)]),
    "insert": lambda x, a, b: a.insert(0, x + 3),
    "pop": lambda x, a, b: a.pop() if a else None,
    "set": lambda x, a, b: a.__setitem__(slice(None), a[:1]),
    "key": lambda x, a, b: b.update(k=x * 3),
    "again": lambda x, a, b: b.update({"z": b.pop("k", None)}),
    "count": lambda x, a, b: b.update(n=b.get("n", 0) + 1),
    "nested": lambda x, a, b: b.setdefault("l", []).append(x.sum()),
    "clear": lambda x, a, b: b.clear(),
    "length": lambda x, a, b: len(a),
    "first": lambda x, a, b: a[0] if a else None,
    "mixed": lambda x, a, b: b.update(a=a),
    "sign": lambda x, a, b: a.append(1) if x.sum() > 0 else b.update(s=x),
}


@settings(max_examples=30, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=4),
    renewed=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=5, max_size=5),
)
def test_any_changes_are_those_of_eager(
    device: torch.device, names: list[str], renewed: list[tuple[bool, bool]]
) -> None:
    make = maker(device)

    def function(x: Tensor, a: list[Any], b: dict[str, Any]) -> Any:
        return x + 1, [CHANGES[name](x, a, b) for name in names]

    def calls() -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        a, b = list[Any](), dict[str, Any]()
        for i, (new_a, new_b) in enumerate(renewed):
            a, b = [] if new_a else a, {} if new_b else b
            found.append((make(i), a, b))
        return found

    check(function, calls)


def test_calls_that_are_known_are_served_natively(device: torch.device) -> None:
    def function(x: Tensor, caches: list[dict[str, Tensor]]) -> Tensor:
        for cache in caches:
            cache["k"] = cache["k"] + x
        return x * 2

    make = maker(device)
    fast, caches = pygraph.jit(function), [{"k": make(i)} for i in range(3)]
    expected = [cache["k"].clone() for cache in caches]
    for i in range(6):
        fast(make(i), caches)
        expected = [one + make(i) for one in expected]
    torch.testing.assert_close([cache["k"] for cache in caches], expected)
    (engine,) = fast.engine.objects.engines()
    if extension.loaded() is not None:
        assert sum(entry.plans for entry in engine.cache.entries) == 1
    caches[1]["k"] = make(9)[:2]  # other shapes, other keys: no plan is theirs
    with pytest.raises(RuntimeError):
        fast(make(0), caches)
    fast(make(0), [{"k": make(1), "v": make(2)}])
