"""What calls leave behind in attributes and variables: stored as in eager, by calls that are graphs."""

from __future__ import annotations

import copy
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pygraph
from pygraph.calls import limits
from pygraph.errors import StateChangeError
from tests import extent

pytestmark = pytest.mark.heap

TOTAL: Any = 0.0


def value(step: int, device: torch.device, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(step)).to(device)


class Centered(nn.Module):
    """A buffer that every call replaces, a number that it counts, and what it has found last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("center", torch.zeros(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.center = self.center * 0.9 + y.detach().mean(0) * 0.1
        self.calls += 1
        self.last = {"x": x, "first": x[0], "parts": [y.detach() * 2]}
        return y - self.center


class Forgetful(Centered):
    """The same, without what it has found last, of which some requires grad where the input does."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = None
        return y


def make(device: torch.device) -> Any:
    torch.manual_seed(0)
    return Centered().to(device)


def test_a_module_in_inference(device: torch.device, native: bool) -> None:
    plain, model = make(device), make(device)
    fast = pygraph.jit(model)
    held: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for step in range(8):
            x = value(step, device, 2, 3)
            assert torch.equal(fast(x), plain(x))
            assert type(model.calls) is int
            assert model.calls == step + 1
            assert model.last["x"] is x
            assert model.last["first"].data_ptr() == x.data_ptr()
            assert torch.equal(model.last["parts"][0], plain.last["parts"][0])
            held.append((model.center, plain.center))
    for got, expected in held:  # none is overwritten by a later call
        assert torch.equal(got, expected)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model._buffers["center"] is model.center
    info = fast.cache_info()
    assert info.captures == 1
    assert info.hits >= 5
    assert not fast.explain().to_dict()["fallbacks"]


def test_a_module_in_training(device: torch.device) -> None:
    """Differentiated from outside; forward and backward are graphs."""
    torch.manual_seed(0)
    plain = Forgetful().to(device)
    model = copy.deepcopy(plain)
    fast = pygraph.jit(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    for step in range(8):
        x = value(step, device, 2, 3)
        for run, optimizer in zip((plain, fast), optimizers, strict=True):
            optimizer.zero_grad()
            run(x).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(model.center, plain.center)
        torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)
        assert model.calls == step + 1
        assert not model.center.requires_grad
    assert not fast.explain().to_dict()["fallbacks"]
    assert fast.cache_info().captures == 2


def test_a_part_of_a_model_in_training(device: torch.device) -> None:
    """What it is passed requires grad."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), Forgetful(), nn.Linear(3, 1)).to(device)
    model = copy.deepcopy(plain)
    model[1] = fast = pygraph.jit(model[1])
    for step in range(6):
        x = value(step, device, 2, 3)
        for run in (plain, model):
            run.zero_grad()
            run(x).square().sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        torch.testing.assert_close(fast.center, plain[1].center)
    assert not fast.explain().to_dict()["fallbacks"]
    assert fast.cache_info().captures == 2


class Recorder(nn.Module):
    """A layer that stores what it has computed where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.features: dict[str, Tensor] = {}
        self.center = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            self.center = self.center * 0.9 + y.detach().mean(0) * 0.1
        return y - self.center


def train(model: nn.Module, device: torch.device) -> None:
    model.train()


def hook(model: nn.Module, device: torch.device) -> None:
    """It is told to record by a hook, into a dict that the caller empties before every call."""
    features = model.features
    model.linear.register_forward_hook(lambda module, args, y: features.__setitem__("y", y.detach()))


@pytest.mark.parametrize("begin", [train, hook])
def test_what_is_differentiated_and_begins_to_store(device: torch.device, begin: Callable[..., None]) -> None:
    """That calls before left nothing behind does not say that later ones, which do, have no graph."""
    torch.manual_seed(0)
    model = Recorder().to(device).eval()
    model.center = model.center.to(device)
    plain = copy.deepcopy(model)
    fast = pygraph.jit(model)
    for step in range(12):
        x = value(step, device, 2, 3)
        if step == 4:
            begin(model, device), begin(plain, device)
        for run, module in ((fast, model), (plain, plain)):
            module.features.clear()
            module.zero_grad()
            run(x).square().sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        torch.testing.assert_close(model.center, plain.center)
        assert model.features.keys() == plain.features.keys()
        torch.testing.assert_close(model.features, plain.features)
    # What fills a location for the first time may be a memo.
    assert sum(note["count"] for note in fast.explain().to_dict()["fallbacks"]) <= 1
    misses = fast.cache_info().misses
    model.features.clear()
    fast(value(12, device, 2, 3))
    assert fast.cache_info().misses == misses


def test_what_is_differentiated_and_begins_to_train_itself(device: torch.device) -> None:
    results: list[Any] = []
    for transform in (lambda fn: fn, pygraph.jit):
        torch.manual_seed(0)
        model = nn.Linear(3, 3).to(device).eval()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(x).square().mean()
            if model.training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return loss

        fast = transform(step)
        for index in range(3):
            fast(value(index, device, 2, 3)).backward()
        model.train()
        losses = [fast(value(index, device, 2, 3)).detach() for index in range(6)]
        results.append([*losses, *model.parameters(), *(p.grad for p in model.parameters())])
        assert fast is step or not fast.explain().to_dict()["fallbacks"]
    torch.testing.assert_close(results[1], results[0])


def test_a_shape_that_comes_after_many_calls(device: torch.device, native: bool) -> None:
    """Calls that were found again show that what is stored keeps its shape, whoever has found them."""
    plain, model = make(device), make(device)
    fast = pygraph.jit(model)
    with torch.no_grad():
        for rows in range(1, limits.LIMITS.state_shapes + 4):
            for step in range(5):
                x = value(step, device, 3, 3)
                if step == 0:
                    model.center, plain.center = (m.center.repeat(rows)[::rows] for m in (model, plain))
                assert torch.equal(fast(x), plain(x))
    assert not fast.explain().to_dict()["fallbacks"]


def test_a_whole_step(device: torch.device) -> None:
    results: list[Any] = []
    for transform in (lambda fn: fn, pygraph.jit):
        model = make(device)
        optimizer = torch.optim.Adam(model.parameters(), 0.1, capturable=True)

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        fast = transform(step)
        losses = [fast(value(i, device, 2, 3)).detach() for i in range(8)]
        assert model.calls == 8
        results.append([*losses, model.center, *model.parameters(), *(p.grad for p in model.parameters())])
        if fast is not step:
            assert fast.cache_info().captures > 0
            assert not [f for f in fast.explain().to_dict()["fallbacks"] if "changes" in f["reason"]]
    torch.testing.assert_close(results[1], results[0])


def test_a_tensor_that_is_stored_with_its_graph(device: torch.device) -> None:
    """It is a result as others are, where calls are differentiated from outside and where they are not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.features = self.linear(x)
            return self.features.relu()

    model = Model().to(device)
    fast = pygraph.jit(model)
    for step in range(4):
        model.zero_grad()
        x = value(step, device, 2, 3)
        (fast(x).sum() + model.features.square().sum()).backward()
        got = model.linear.weight.grad
        model.zero_grad()
        y = model.linear(x)
        (y.relu().sum() + y.square().sum()).backward()
        torch.testing.assert_close(got, model.linear.weight.grad)
    assert not fast.explain().to_dict()["fallbacks"]
    with torch.no_grad():
        for step in range(5):
            x = value(step, device, 2, 3)
            assert torch.equal(fast(x), model.linear(x).relu())
            assert torch.equal(model.features, model.linear(x))
    assert fast.cache_info().captures == 3


def variables() -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    last = total = None
    count = 0

    def fn(x: Tensor) -> Tensor:
        nonlocal last, total, count
        last, total, count = x * 2, x if total is None else total + x, count + 1
        return x + total

    return fn, lambda: [last, total, count]


def a_global() -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    global TOTAL
    TOTAL = 0.0

    def fn(x: Tensor) -> Tensor:
        global TOTAL
        TOTAL = TOTAL + x.sum()
        return x * TOTAL

    return fn, lambda: [TOTAL]


def entries() -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    found: dict[Any, Any] = {"a": 1, 2: None}

    def fn(x: Tensor) -> Tensor:
        found["a"] += 1
        found[2] = (x, [x.mean(), "text", None])
        found.pop("gone", None)
        return x * 2

    return fn, lambda: [found]


def a_static_cache() -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    class Cache:
        def __init__(self) -> None:
            self.keys: Any = None
            self.position: Any = None

        def update(self, x: Tensor) -> Tensor:
            if self.keys is None:
                self.keys, self.position = x.new_zeros(16, 3), torch.zeros(1, dtype=torch.long, device=x.device)
            self.keys = self.keys.index_copy(0, self.position, x[None])
            self.position = self.position + 1
            return self.keys

    cache = Cache()
    return lambda x: cache.update(x).sum(0) * x, lambda: [cache.keys, cache.position]


def objects() -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    class State:
        def __init__(self, mean: Tensor, spread: Any) -> None:
            self.mean, self.spread = mean, spread

    holder = types.SimpleNamespace(state=State(torch.zeros(()), [1.0]), kept=State(torch.ones(3), None))
    kept = holder.kept

    def fn(x: Tensor) -> Tensor:
        holder.state = State(holder.state.mean * 0.5 + x.mean(), [holder.state.spread[0] * 2])
        holder.kept = kept
        return x - holder.state.mean

    return fn, lambda: [holder.state.mean, holder.state.spread, holder.kept is kept]


KINDS = {
    "objects": objects,
    "variables": variables,
    "a global": a_global,
    "entries": entries,
    "a static cache": a_static_cache,
}


@pytest.mark.parametrize("name", KINDS)
def test_other_locations(device: torch.device, name: str) -> None:
    plain, plain_state = KINDS[name]()
    expected = [copy.copy([plain(value(i, device, 3)), *plain_state()]) for i in range(8)]
    fn, state = KINDS[name]()
    fast = pygraph.jit(fn)
    for step in range(8):
        got = [fast(value(step, device, 3)), *state()]
        if name != "entries":
            torch.testing.assert_close(got, expected[step], rtol=0, atol=0)
    if name == "entries":
        assert state()[0]["a"] == 9
        assert state()[0][2][1][1:] == ["text", None]
        assert torch.equal(state()[0][2][0], value(7, device, 3))
    assert not fast.explain().to_dict()["fallbacks"]
    assert fast.cache_info().captures <= 2


def test_what_is_left_alone_stays_the_same_object(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept: Any = {"a": [torch.ones(3)]}
            self.seen = 0

        def forward(self, x: Tensor, replace: bool) -> Tensor:
            self.seen += 1
            if replace:
                self.kept = {"a": [x * 2]}
            return x + self.kept["a"][0].to(x.device)

    model = Model()
    fast = pygraph.jit(model)
    x = value(0, device, 3)
    for _ in range(3):
        fast(x, True)
    before = model.kept
    for _ in range(4):
        assert torch.equal(fast(x, False), x * 3)
        assert model.kept is before
    assert model.seen == 7


def test_what_the_caller_changes_between_calls_is_seen(device: torch.device, native: bool) -> None:
    plain, model = make(device), make(device)
    fast = pygraph.jit(model)

    def other(step: int) -> None:
        for m in (plain, model):
            if step == 3:
                m.center = value(9, device, 3)
            elif step == 4:
                m.center.mul_(2)
            elif step == 5:
                m.calls = 100
            elif step == 6:
                del m.last
            elif step == 7:
                m.load_state_dict({**m.state_dict(), "center": torch.ones(3)})
            elif step == 8:
                m.center = value(9, device, 6)[::2]
            elif step == 9:
                m.linear = nn.Linear(3, 3, device=device)
                m.linear.load_state_dict({"weight": torch.eye(3), "bias": torch.zeros(3)})

    with torch.no_grad():
        for step in range(12):
            other(step)
            x = value(step, device, 2, 3)
            assert torch.equal(fast(x), plain(x)), step
            assert torch.equal(model.center, plain.center), step
            assert model.calls == plain.calls


def test_a_cache_that_grows_runs_as_it_is(device: torch.device) -> None:
    """No call is like one before; after a few that is given up, and the report says so."""

    class Cache(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.keys = x[None] if not hasattr(self, "keys") else torch.cat([self.keys, x[None]])
            return self.keys.sum(0)

    plain, model = Cache(), Cache()
    fast = pygraph.jit(model)
    for step in range(12):
        x = value(step, device, 3)
        torch.testing.assert_close(fast(x), plain(x), rtol=0, atol=0)
        assert torch.equal(model.keys, plain.keys)
    assert fast.cache_info().misses <= limits.LIMITS.state_shapes + 4
    assert "another shape at every call" in str(fast.explain().to_dict()["fallbacks"])


class Concatenating(nn.Module):
    """Attention of one token to those before, of which the keys and values are kept."""

    keys: Tensor

    def begin(self) -> None:
        self.is_new = True

    def forward(self, x: Tensor) -> Tensor:
        self.keys = x[None] if self.is_new else torch.cat([self.keys, x[None]])
        self.is_new = False
        return (self.keys @ x).softmax(0) @ self.keys


class Writing(nn.Module):
    """The same with a position in memory that is there from the beginning."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.keys, self.position = torch.zeros(8, 3, device=device), 0

    def begin(self) -> None:
        self.position = 0

    def forward(self, x: Tensor) -> Tensor:
        self.keys[self.position] = x
        self.position += 1
        known = self.keys[: self.position]
        return (known @ x).softmax(0) @ known


@pytest.mark.parametrize("kind", ["concatenating", "writing"])
def test_a_cache_that_grows_and_begins_anew_has_a_graph_for_each_length(device: torch.device, kind: str) -> None:
    """What does not come again is not compiled; the second sequence has the lengths of the first."""
    plain, model = (Concatenating() if kind == "concatenating" else Writing(device) for _ in range(2))
    fast = pygraph.jit(model)
    before = fast.cache_info()
    for sequence in range(7):
        before = fast.cache_info()
        plain.begin()
        model.begin()
        for step in range(8):
            x = value(sequence * 8 + step, device, 3)
            torch.testing.assert_close(fast(x), plain(x))
            torch.testing.assert_close(model.keys, plain.keys, rtol=0, atol=0)
    info = fast.cache_info()
    assert info.captures == before.captures, fast.explain()
    assert info.hits >= before.hits + 6, fast.explain()


def test_a_counter_that_decides_has_a_graph_for_each_decision(device: torch.device) -> None:
    """Its comparison is made before the call."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * 2 if self.calls % 3 == 0 else x

    plain, model = Model(), Model()
    fast = pygraph.jit(model)
    for step in range(20):
        x = value(step, device, 3)
        assert torch.equal(fast(x), plain(x))
        assert model.calls == step + 1
    assert fast.cache_info().misses <= 6
    assert fast.cache_info().hits >= 16
    assert fast.explain().to_dict()["fallbacks"] == []


def test_a_counter_whose_value_is_needed_runs_as_it_is(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * (2 if {3: 1}.get(self.calls) else 1)

    plain, model = Model(), Model()
    fast = pygraph.jit(model)
    for step in range(9):
        x = value(step, device, 3)
        assert torch.equal(fast(x), plain(x))
        assert model.calls == step + 1
    assert fast.cache_info().misses <= 4
    (fallback,) = fast.explain().to_dict()["fallbacks"]
    assert "calls is another number at every call, and decides what it does" in fallback["reason"]


def test_results_that_share_memory_with_what_is_stored(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.mean = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.last, self.mean = y.detach(), y.detach().mean()
            return y

    torch.manual_seed(0)
    plain = Model().to(device)
    model = copy.deepcopy(plain)
    fast = pygraph.jit(model)
    for step in range(5):
        x = value(step, device, 2, 3)
        for run, m in ((plain, plain), (fast, model)):
            m.zero_grad()
            y = run(x)
            assert m.last.data_ptr() == y.data_ptr()
            assert not m.last.requires_grad
            y.square().sum().backward()
        assert torch.equal(model.last, plain.last)
        torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)


def test_a_list_that_grows_at_its_front(device: torch.device) -> None:
    found: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        found.insert(0, x * 2)
        return x + 1

    fast = pygraph.jit(fn)
    for step in range(5):
        x = value(step, device, 3)
        assert torch.equal(fast(x), x + 1)
        assert torch.equal(found[0], x * 2)
    assert len(found) == 5


def test_tracing_says_what_changes(device: torch.device) -> None:
    model = make(device)
    with torch.no_grad(), pytest.raises(StateChangeError, match="it changes") as raised:
        pygraph.trace(model)(value(0, device, 2, 3))
    assert raised.value.locations is not None
    assert {location.name for location in raised.value.locations} == {"calls", "last", "center"}
    assert model.calls == 0
    assert not hasattr(model, "last")


def test_strict_calls_are_graphs_from_the_first(device: torch.device) -> None:
    plain, model = make(device), make(device)
    fast = pygraph.jit(model, strict=True)
    with torch.no_grad():
        for step in range(4):
            x = value(step, device, 2, 3)
            assert torch.equal(fast(x), plain(x))
            assert torch.equal(model.center, plain.center)
    assert model.calls == 4


def test_an_error_leaves_what_eager_leaves(device: torch.device) -> None:
    plain, model = make(device), make(device)
    fast = pygraph.jit(model)
    with torch.no_grad():
        for step in range(4):
            x = value(step, device, 2, 3)
            fast(x), plain(x)
        for run in (fast, plain):
            with pytest.raises(RuntimeError):
                run(value(5, device, 2, 4))
        assert model.calls == plain.calls
        x = value(6, device, 2, 3)
        assert torch.equal(fast(x), plain(x))


# ---- any updates, and anything that happens in between -------------------------------------------------------------

UPDATES: dict[str, Callable[[Any, Tensor], Any]] = {
    "average": lambda m, x: setattr(m, "a", m.a * 0.5 + x),
    "input": lambda m, x: setattr(m, "a", x),
    "view": lambda m, x: setattr(m, "b", m.a[:2]),
    "swap": lambda m, x: m.__dict__.update(a=m.c, c=m.a),
    "in place": lambda m, x: m.a.add_(1),
    "both": lambda m, x: setattr(m, "a", m.a.mul_(2) + m.c),
    "shared": lambda m, x: m.__dict__.update(a=x * 2, c=x * 2) or setattr(m, "c", m.a),
    "count": lambda m, x: setattr(m, "n", m.n + 1),
    "container": lambda m, x: setattr(m, "d", {"x": x, "old": m.a + 1, "n": m.n}),
    "none": lambda m, x: setattr(m, "d", None),
    "nothing": lambda m, x: None,
}
EVENTS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "other tensor": lambda m: setattr(m, "a", m.a * 3),
    "in place": lambda m: m.c.mul_(2),
    "number": lambda m: setattr(m, "n", 7),
    "shared": lambda m: setattr(m, "a", m.c),
}


class Holder:
    def __init__(self, updates: list[str], device: torch.device) -> None:
        self.a, self.c = torch.ones(3, device=device), torch.arange(3.0, device=device)
        self.b, self.d, self.n = None, None, 0
        self._updates = updates

    def __call__(self, x: Tensor) -> Tensor:
        y = x * 2
        for name in self._updates:
            UPDATES[name](self, x)
            y = y + self.a * self.c
        return y


@settings(max_examples=extent.examples(20, 200))
@given(
    updates=st.lists(st.sampled_from(sorted(UPDATES)), min_size=1, max_size=4),
    events=st.lists(st.sampled_from(sorted(EVENTS)), min_size=3, max_size=7),
    hold=st.booleans(),
)
def test_any_updates(device: torch.device, updates: list[str], events: list[str], hold: bool) -> None:
    plain, quick = Holder(updates, device), Holder(updates, device)
    fast = pygraph.jit(quick)
    held: list[tuple[Any, Any]] = []

    def state(holder: Holder) -> list[Any]:
        return [holder.a, holder.b, holder.c, holder.d, holder.n]

    for step, event in enumerate(events):
        given = value(step, device, 3), value(step, device, 3)
        got, expected = fast(given[0]), plain(given[1])
        torch.testing.assert_close([got, *state(quick)], [expected, *state(plain)], rtol=0, atol=0)
        # What shares memory in eager does here, and nothing else.
        for (i, j), k in itertools.product(itertools.combinations(range(3), 2), [state]):
            pairs = [(k(holder)[i], k(holder)[j]) for holder in (plain, quick)]
            if all(isinstance(t, Tensor) for pair in pairs for t in pair):
                assert len({a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in pairs}) == 1
        if hold:
            held.append(([got, quick.c], [expected, plain.c]))
        EVENTS[event](plain), EVENTS[event](quick)
    for got, expected in held:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_results_of_layers_that_are_kept(device: torch.device) -> None:
    """As for a loss on features: hooks store what layers return."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    features: dict[str, Tensor] = {}
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda module, args, out, name=name: features.update({name: out}))
    fast = pygraph.jit(model)
    with torch.no_grad():
        for step in range(6):
            x = value(step, device, 2, 3)
            got = fast(x)
            torch.testing.assert_close(features["0"], F.linear(x, model[0].weight, model[0].bias))
            assert features["2"] is got
    assert fast.cache_info().captures == 1


def test_a_number_that_decides_and_comes_back_has_a_graph_for_each_value(device: torch.device) -> None:
    """As a size that goes round; one that never comes back is found out after a few."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.size = 0

        def forward(self, x: Tensor) -> Tensor:
            return x[: self.size] * 2

    plain, model = Model(), Model()
    fast = pygraph.jit(model)
    for step in range(60):
        plain.size = model.size = step % limits.LIMITS.single_kinds + 1
        x = value(step, device, 13)
        for _ in range(2):
            assert torch.equal(fast(x), plain(x))
    assert fast.explain().to_dict()["fallbacks"] == []
    assert fast.cache_info().captures <= 26  # a comparison that is found late makes all anew, once
    for step in range(100, 130):
        plain.size = model.size = step
        x = value(step, device, 130)
        assert torch.equal(fast(x), plain(x))
    (fallback,) = fast.explain().to_dict()["fallbacks"]
    assert "size" in fallback["reason"]


SHAPED: dict[str, Callable[[Tensor], object]] = {
    "t_": lambda h: h.t_(),
    "unsqueeze_": lambda h: h.unsqueeze_(0) if h.dim() < 5 else h.squeeze_(),
    "transpose_": lambda h: h.transpose_(0, 1),
    "as_strided_": lambda h: h.as_strided_((3, 2), (2, 1)),
}


@pytest.mark.parametrize("name", SHAPED)
def test_another_shape_of_a_tensor_from_before(device: torch.device, name: str) -> None:
    """Its memory stays as it is, so that no update of it is noticed."""

    def shapes(run: Callable[..., Any]) -> list[Any]:
        held = types.SimpleNamespace(h=torch.arange(6.0, device=device).view(2, 3))

        def step(x: Tensor) -> Any:
            SHAPED[name](held.h)
            return x + 1, held.h.shape, held.h * 1

        call = run(step)
        return [(call(torch.ones(3, device=device)), held.h.shape, held.h.tolist()) for _ in range(4)]

    assert str(shapes(pygraph.jit)) == str(shapes(lambda fn: fn))


def test_a_result_that_resizes_a_tensor_from_before(device: torch.device) -> None:
    h = torch.empty(0, device=device)

    @pygraph.jit
    def step(x: Tensor) -> Tensor:
        torch.mul(x, 2, out=h)
        return h + 1

    for _ in range(3):
        assert step(torch.ones(2, device=device)).tolist() == [3, 3]
        assert h.tolist() == [2, 2]
