"""When calls that run as they are are looked at, or traced, again; a made-up clock says what time it is."""

from __future__ import annotations

import dataclasses
import doctest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pygraph
from pygraph.autograd import composition, lookup
from pygraph.calls import limits, retries
from pygraph.calls.keys import Keys
from pygraph.calls.retries import Budget, Traces, look_of
from pygraph.guards.guard_set import GuardSet
from pygraph.process import extension

pytestmark = pytest.mark.rotates


class Clock:
    """Seconds that pass as a test says, and a millisecond whenever somebody looks, so that a trace takes some time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def seldom(monkeypatch: pytest.MonkeyPatch, **shares: float) -> None:
    """Give lookups or traces other shares of the time."""
    monkeypatch.setattr(limits, "LIMITS", dataclasses.replace(limits.LIMITS, **shares))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retries, "clock", clock)
    monkeypatch.setattr(retries, "cpu_clock", clock)
    return clock


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(6.0, device=device)


# ---- budgets -----------------------------------------------------------------------------------------------------


def test_no_time_is_gained_while_a_process_waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0.0
    monkeypatch.setattr(retries, "cpu_clock", lambda: computed)
    budget = retries.Budget(0, 0.5)
    budget.lose(1.0)
    clock.now += 1000
    assert not budget.allows()
    computed = 2.5
    assert budget.allows()
    budget.lose(1.0)
    computed += 1000  # in many threads
    assert not budget.allows()


def test_examples() -> None:
    found = doctest.testmod(retries)
    assert found.attempted
    assert not found.failed


def test_losses_are_free_at_first_and_then_a_share_of_the_time(clock: Clock) -> None:
    budget = Budget(free=3, share=0.01)
    for _ in range(3):
        assert budget.allows()
        budget.lose(1.0)
    assert budget.allows()
    for _ in range(20):
        budget.lose(1.0)
        assert not budget.allows()
        clock.now += 98
        assert not budget.allows()
        clock.now += 2
        assert budget.allows()


def test_a_short_loss_does_not_end_what_a_long_one_has_begun(clock: Clock) -> None:
    budget = Budget(free=0, share=0.1)
    budget.lose(2.0)
    budget.lose(0.1)
    clock.now += 10
    assert not budget.allows()
    clock.now += 11
    assert budget.allows()


def test_a_gain_makes_losses_free_again(clock: Clock) -> None:
    budget = Budget(free=1, share=0.01)
    budget.lose(5.0, count=7)
    assert not budget.allows()
    budget.renew()
    budget.lose(5.0)
    assert budget.allows()


@pytest.mark.parametrize("seconds", [0.01, 1.0, 30.0])
def test_traces_that_come_to_nothing_take_a_share_of_the_time(clock: Clock, seconds: float) -> None:
    traces, spent = Traces(), 0.0
    for _ in range(5000):  # calls that take half a second, and change something each time
        clock.now += 0.5
        if traces.allow_another():
            clock.now += seconds
            spent += seconds
            traces.note_made(seconds)
            traces.note_outdated(wasted=True)
    free = (limits.LIMITS.wasted_traces + 1) * seconds
    assert free <= spent <= free + 0.0101 * clock.now + seconds


def test_traces_that_are_used_are_free(clock: Clock) -> None:
    traces = Traces()
    for _ in range(3 * limits.LIMITS.outdated_traces):
        assert traces.allow_another()
        traces.note_made(1.0)
        traces.note_used(limits.LIMITS.settled_calls)
        traces.note_outdated(wasted=False)


def test_one_loss_is_counted_once(clock: Clock) -> None:
    traces = Traces()
    traces.note_made(1.0)
    for _ in range(100):
        traces.note_outdated(wasted=True)
    assert traces.allow_another()


# ---- calls that are not looked at ----------------------------------------------------------------------------------


def branching(*xs: Any) -> torch.Tensor:
    return xs[0] * 2 if "-" not in str(xs[0].sum()) else xs[0] * 3


def hooked(*xs: Any) -> torch.Tensor:
    y = xs[0] * 2
    y.register_hook(lambda g: g)
    return y


def numpy_array(x: torch.Tensor) -> tuple[Any, ...]:
    return x, np.ones(2)


def unhashable(x: torch.Tensor) -> tuple[Any, ...]:
    return x, {1}


def sparse(x: torch.Tensor) -> tuple[Any, ...]:
    return x, torch.eye(2, device="cpu").to_sparse()


def leaf(x: torch.Tensor) -> tuple[Any, ...]:
    return (x.clone().requires_grad_(),)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often calls were looked at, by what does it."""
    counts: dict[str, int] = {}

    def count(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return inner(*args, **kwargs)

        counts[name] = 0
        monkeypatch.setattr(owner, name, counting)

    count(Keys, "of")
    count(GuardSet, "hold")
    count(composition, "find_site")
    return counts


KINDS: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor], tuple[Any, ...]]]] = {
    "a branch": (branching, lambda x: (x,)),
    "an array": (branching, numpy_array),
    "a set": (branching, unhashable),
    "a sparse tensor": (branching, sparse),
    "differentiated, with a hook": (hooked, leaf),
    "differentiated, on the cpu": (lambda x: x * 2, lambda x: (x.cpu().requires_grad_(),)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("natively", [True, False])
def test_a_known_fallback_is_not_looked_at(
    x: torch.Tensor, kind: str, natively: bool, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom(monkeypatch, lookup_share=1e-9)  # a lookup is not made again while this test runs
    monkeypatch.setenv("PYGRAPH_NATIVE", str(int(natively)))
    if natively:
        extension.start(wait=True)
    fn, make = KINDS[kind]
    fast = pygraph.jit(fn)
    args = make(x)
    for _ in range(limits.LIMITS.lookups + 2):
        assert torch.equal(fast(*args), fn(*args))
    before = dict(counted)
    for _ in range(50):
        assert torch.equal(fast(*args), fn(*args))
    assert counted == before
    notes = fast.explain().to_dict()["fallbacks"]
    assert sum(note["count"] for note in notes) == limits.LIMITS.lookups + 52, notes


@pytest.mark.parametrize("natively", [True, False])
def test_calls_that_need_no_graph_are_not_looked_at(
    x: torch.Tensor, natively: bool, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom(monkeypatch, lookup_share=1e-9)
    monkeypatch.setenv("PYGRAPH_NATIVE", str(int(natively)))
    if natively:
        extension.start(wait=True)
    fast = pygraph.jit(lambda x, y: (x.detach(), y + 1))  # nothing is computed on the device
    y = torch.ones(3, device="cpu")
    for _ in range(limits.LIMITS.lookups + 2):
        assert torch.equal(fast(x, y)[1], y + 1)
    before = dict(counted)
    for _ in range(50):
        assert torch.equal(fast(x, y)[1], y + 1)
    assert counted == before
    assert fast.cache_info().hits == limits.LIMITS.lookups + 51
    assert not fast.explain().to_dict()["fallbacks"]


def test_steps_that_are_given_up_are_not_looked_at(
    x: torch.Tensor, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom(monkeypatch, lookup_share=1e-9)
    seldom(monkeypatch, trace_share=1e-9)
    monkeypatch.setenv("PYGRAPH_NATIVE", "0")

    class Growing:
        def __init__(self) -> None:
            self.cache = torch.ones(1, device=x.device)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = torch.cat([self.cache, x[:1]])
            return x + 1

    growing = Growing()
    fast = pygraph.jit(growing)
    calls = 3 * limits.LIMITS.lookups
    for _ in range(calls):
        fast(x)
    before = dict(counted)
    for _ in range(50):
        assert torch.equal(fast(x), x + 1)
    assert counted == before
    assert growing.cache.numel() == calls + 51


def test_calls_that_are_not_looked_at_count_as_used(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    seldom(monkeypatch, lookup_share=1e-9)
    monkeypatch.setenv("PYGRAPH_NATIVE", "0")
    fast = pygraph.jit(lambda x, flag: x * 2 if flag or x.sum() > 0 else x, max_graphs=2)
    for _ in range(limits.LIMITS.lookups + 2):
        fast(x, False)
    refused = next(iter(fast.engine.cache.entries))
    fast(x, True)
    fast(x, False)  # which is not looked at
    fast(x.double(), True)  # for which the least recently used entry makes room
    assert refused in fast.engine.cache.entries


def test_shared_memory_of_a_known_call_makes_no_plan(x: torch.Tensor) -> None:
    """A plan that cannot match would be compared at every further call."""
    extension.start(wait=True)
    buffer = torch.zeros_like(x)

    def fn(y: torch.Tensor) -> torch.Tensor:
        buffer.add_(1)
        return y * 2

    fast = pygraph.jit(fn)
    for _ in range(4):
        fast(x)
    (entry,) = fast.engine.cache.entries
    before = entry.plans
    for _ in range(8):
        buffer.zero_()
        assert torch.equal(fast(buffer[:]), torch.full_like(x, 2))
    assert entry.plans == before


def test_calls_that_look_alike_are_looked_at_again_in_time(x: torch.Tensor, clock: Clock) -> None:
    fast = pygraph.jit(lambda x, config: x + 1, static_argnums=1)

    class Config(bytearray):
        """What can be part of a key, once it has a hash."""

        __hash__: Any = None

    config = Config()
    for _ in range(3 * limits.LIMITS.lookups):
        fast(x, config)
    assert fast.cache_info().misses == 0
    Config.__hash__ = object.__hash__
    fast(x, config)
    assert fast.cache_info().misses == 0  # it is not looked at
    clock.now += 2
    fast(x, config)
    assert fast.cache_info().captures == 1  # it is
    fast(x, config)
    assert fast.cache_info().hits == 1


def test_what_comes_after_a_few_fallbacks_is_looked_at_at_once(x: torch.Tensor) -> None:
    fast = pygraph.jit(lambda x, flag: x * 2 if flag or "-" not in str(x.sum()) else x)
    for _ in range(3 * limits.LIMITS.lookups):
        fast(x, False)
    fast(x, True)  # which looks different
    assert fast.cache_info().captures == 1
    module = Switching()
    switched = pygraph.jit(module)
    for _ in range(3):
        switched(x)
    module.eval()
    switched(x)
    assert switched.cache_info().captures == 1


class Switching(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Branches on the text of a value in training."""
        return x * 2 if not self.training or "-" not in str(x.sum()) else x


def test_strict_functions_look_at_every_call(x: torch.Tensor) -> None:
    fast = pygraph.jit(branching, strict=True)
    for _ in range(2 * limits.LIMITS.lookups):
        with pytest.raises(pygraph.errors.FallbackError):
            fast(x)


def test_what_is_seen_at_a_glance(x: torch.Tensor) -> None:
    seen = [look_of((x, 1), {}), look_of((x, 1.0), {}), look_of((x,), {"k": 1}), look_of((x, True), {})]
    seen += [look_of((x, False), {}), look_of((x, "a"), {})]
    with torch.no_grad():
        seen.append(look_of((x, 1), {}))
    with torch.inference_mode():
        seen.append(look_of((x, 1), {}))
    assert len(set(seen)) == len(seen)
    assert look_of((x, 1), {}) == look_of((x + 1, 2), {})


# ---- traces that come to nothing -------------------------------------------------------------------------------------


class Scale:
    """What a caller makes anew for each call."""

    def __init__(self, value: float) -> None:
        self.value = value


class Whole(Scale):
    """Such an object that is not taken apart."""

    def __del__(self) -> None:
        pass


def test_an_object_for_each_call_ends_in_ordinary_calls(x: torch.Tensor, clock: Clock) -> None:
    fast = pygraph.jit(lambda x, scale: x * scale.value)
    for n in range(3 * limits.LIMITS.outdated_traces):
        assert torch.equal(fast(x, Whole(n)), x * n)
    captures = fast.cache_info().captures
    assert captures <= limits.LIMITS.outdated_traces + 2
    assert "an object that it is passed is another one at every call" in " ".join(str(fast.explain()).split())
    clock.now += 1000
    scale = Whole(2.0)
    for _ in range(3):
        assert torch.equal(fast(x, scale), x * 2)
    assert fast.cache_info().captures == captures + 1
    assert fast.cache_info().hits >= 1


@pytest.mark.parametrize(("kind", "captures"), [(Scale, 2), (Whole, 24)])
def test_objects_that_come_again_are_graphs(x: torch.Tensor, kind: type[Scale], captures: int) -> None:
    """One for each, or one for all numbers that they hold, where they are taken apart once there was another one."""
    fast = pygraph.jit(lambda x, scale: x * scale.value)
    scales = [kind(n) for n in range(24)]
    for _ in range(3):
        for n, scale in enumerate(scales):
            assert torch.equal(fast(x, scale), x * n)
    assert fast.cache_info().captures == captures


class Cache:
    """Keys that grow at every call, as of a model that generates text."""

    def __init__(self, x: torch.Tensor) -> None:
        self.keys = x[:1]


def test_objects_that_grow_end_in_ordinary_calls(x: torch.Tensor, clock: Clock) -> None:
    def fn(cache: Cache, x: torch.Tensor) -> torch.Tensor:
        cache.keys = torch.cat([cache.keys, x])
        return cache.keys.sum()

    fast = pygraph.jit(fn)
    for _ in range(20):
        mine, theirs = Cache(x), Cache(x)
        for _ in range(8):
            assert torch.equal(fast(mine, x), fn(theirs, x))
    assert fast.cache_info().misses < 60


def test_too_many_kinds_in_turn_do_not_push_each_other_out_for_ever(x: torch.Tensor, clock: Clock) -> None:
    fast = pygraph.jit(lambda x: x + 1, max_graphs=2)
    for _ in range(30):
        for n in range(1, 6):
            assert torch.equal(fast(x[:n]), x[:n] + 1)
    assert fast.cache_info().captures < 30


# ---- calls that are differentiated from outside --------------------------------------------------------------------


def _traces_of(
    function: Any, fn: Any, calls: int, before: Callable[[int], tuple[Any, ...]], patch: pytest.MonkeyPatch
) -> int:
    """How often calls that are differentiated are found out anew; their results and gradients are right."""
    found: list[int] = []
    discover = lookup.discover

    def counting(*args: Any) -> Any:
        found.append(0)
        return discover(*args)

    patch.setattr(lookup, "discover", counting)
    for number in range(calls):
        args = before(number)
        results = [each(*args) for each in (function, fn)]
        assert torch.equal(*results)
        weights = [
            tensor for tensor in (*args, *_weights(fn)) if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        ]
        for mine, other in zip(*(torch.autograd.grad(r.sum(), weights) for r in results), strict=True):
            assert torch.equal(mine, other)
    return len(found)


def _weights(fn: Any) -> list[torch.Tensor]:
    return list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []


@pytest.mark.parametrize("what", ["a number", "a list", "a hook"])
def test_a_module_in_training_that_finds_something_else_at_every_call_is_given_up(
    what: str, clock: Clock, native: bool, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = torch.nn.Sequential(torch.nn.Linear(6, 6)).to(x.device)
    hooks: list[Any] = []

    def change(number: int) -> tuple[Any, ...]:
        if what == "a hook":
            for hook in hooks:
                hook.remove()
            hooks[:] = [module[0].register_forward_hook(lambda *_: None)]
        else:
            module[0].found = float(number) if what == "a number" else [number]
        return (x,)

    function = pygraph.jit(module)
    assert _traces_of(function, module, 60, change, monkeypatch) == limits.LIMITS.wasted_traces + 1
    assert any("changes at every call" in note["reason"] for note in function.explain().to_dict()["fallbacks"])
    clock.now += 1000.0  # it is tried again, and then kept
    before = function.cache_info().captures
    for _ in range(3):
        function(x)
    assert function.cache_info().captures == before + 1


@pytest.mark.parametrize(
    ("argument", "limit"),
    [
        (lambda number: lambda y: y * 2.0, limits.LIMITS.outdated_traces + 1),
        (lambda number: f"text {number}", 3 * 4 + 4),
        (lambda number: float(number + 1), 3 * 4 + 4),
    ],
)
def test_arguments_that_are_never_the_same_in_training(
    argument: Callable[[int], Any], limit: int, clock: Clock, native: bool, x: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fn(x: torch.Tensor, other: Any) -> torch.Tensor:
        if callable(other):
            return other(x) + 1
        return x * len(other) if isinstance(other, str) else x / other if other > 0 else x

    weight = x.clone().requires_grad_()
    function = pygraph.jit(fn, max_graphs=4)
    found = _traces_of(function, fn, 60, lambda number: (weight, argument(number)), monkeypatch)
    assert 1 < found <= limit


def test_kinds_of_calls_that_come_again_in_training_are_found_out_once(
    clock: Clock, native: bool, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = torch.nn.Linear(6, 6).to(x.device)

    def change(number: int) -> tuple[Any, ...]:
        module.train(number % 2 == 0)
        return (x.repeat(number % 3 + 1, 1),)

    assert _traces_of(pygraph.jit(module), module, 60, change, monkeypatch) == 6
