"""jit: the cache and its numbers, options, decorators, methods, threads, memory."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch

import pygraph
from pygraph.calls import limits, retries
from pygraph.calls.cache import CacheInfo
from pygraph.errors import ArgumentError, FallbackError, TraceError
from tests.memory import live_bytes


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(6.0, device=device).view(2, 3)


# ---- the cache -------------------------------------------------------------------------------------------------


def test_cache_info_counts(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x, k: x * k)
    assert fn.cache_info() == CacheInfo(hits=0, misses=0, captures=0, evictions=0, size=0)
    fn(x, 1.0)
    assert fn.cache_info() == CacheInfo(hits=0, misses=1, captures=1, evictions=0, size=1)
    for k in (2.0, 3.0):
        fn(x, k)
    fn(x.clone(), 4.0)
    assert fn.cache_info() == CacheInfo(hits=3, misses=1, captures=1, evictions=0, size=1)
    fn(x[:1], 1.0)
    fn(x, 1)
    assert fn.cache_info() == CacheInfo(hits=3, misses=3, captures=3, evictions=0, size=3)
    fn.cache_clear()
    assert fn.cache_info() == CacheInfo(hits=0, misses=0, captures=0, evictions=0, size=0)
    assert torch.equal(fn(x, 2.0), x * 2)


def test_what_is_new_traces_and_what_is_not_does_not(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x, *rest: x * 2)
    fn(x)
    for call in ((x.t(),), (x.double(),), (x, True), (x, False), (x, "a"), (x, "b"), (x, None), (x, [x])):
        before = fn.cache_info().misses
        fn(*call)
        assert fn.cache_info().misses == before + 1, call
        fn(*call)
        assert fn.cache_info().misses == before + 1, call


def test_a_number_that_decides_is_part_of_the_key(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x, k: x * 2 if k > 1 else x + 1)
    for k in (0, 1, 2, 0, 1, 2):
        assert torch.equal(fn(x, k), fn.fn(x, k))
    assert fn.cache_info().misses == 3
    assert fn.cache_info().hits == 3


def test_the_least_recently_used_graph_makes_room(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: x + 1, max_graphs=2)
    shapes = [x, x[:1], x[:, :2].contiguous()]
    fn(shapes[0])
    fn(shapes[1])
    fn(shapes[0])
    fn(shapes[2])
    assert fn.cache_info()[3:] == (1, 2)
    fn(shapes[0])
    assert fn.cache_info().misses == 3
    fn(shapes[1])
    assert fn.cache_info().misses == 4


def test_past_the_budget_calls_run_as_ordinary_launches(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: x + 1, max_graphs=1)
    results = [(n, fn(torch.zeros(n, device=x.device))) for n in range(1, 20)]
    assert all(torch.equal(result, torch.ones(n, device=x.device)) for n, result in results)
    info = fn.cache_info()
    assert info.captures < 10
    assert info.size == 1
    for _ in range(3):  # a kind that comes again gets its graph after all
        fn(torch.zeros(50, device=x.device))
    assert fn.cache_info().hits >= 1


def test_cache_clear_and_the_last_reference_free_everything(device: torch.device) -> None:
    before = live_bytes(device)
    weight = torch.ones(64, 64, device=device)
    fn = pygraph.jit(lambda x: torch.relu(x @ weight) + weight.sum())
    for n in (1, 2, 3):
        fn(torch.ones(n, 64, device=device))
    fn.cache_clear()
    assert live_bytes(device) == before + weight.nbytes
    fn(torch.ones(4, 64, device=device))
    del fn
    weight = None
    assert live_bytes(device) == before


# ---- options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"static_argnums": "a"}, "static_argnums='a'; expected integers"),
        ({"static_argnums": (1.5,)}, "expected integers"),
        ({"static_argnames": (1,)}, "expected strings"),
        ({"max_graphs": 0}, "max_graphs=0; expected a positive integer"),
        ({"max_graphs": True}, "expected a positive integer"),
        ({"max_graphs": 1.0}, "expected a positive integer"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        pygraph.jit(lambda x: x, **options)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        pygraph.jit(lambda x: x, colour="red")  # pyright: ignore


@pytest.mark.parametrize("options", [{"static_argnums": 1}, {"static_argnums": (1,)}, {"static_argnums": -1}])
def test_static_argnums(x: torch.Tensor, options: dict[str, Any]) -> None:
    fn = pygraph.jit(lambda x, k: x * k, **options)
    for k in (2.0, 3.0, 2.0):
        assert torch.equal(fn(x, k), x * k)
    assert fn.cache_info()[:2] == (1, 2)


@pytest.mark.parametrize("names", ["k", ("k",)])
def test_static_argnames(x: torch.Tensor, names: Any) -> None:
    fn = pygraph.jit(lambda x, *, k: x * k, static_argnames=names)
    for k in (2.0, 3.0, 2.0):
        assert torch.equal(fn(x, k=k), x * k)
    assert fn.cache_info()[:2] == (1, 2)


def test_an_unhashable_static_argument_runs_as_it_is(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x, s: x * len(s))
    assert torch.equal(fn(x, {1, 2}), x * 2)
    (fallback,) = fn.explain().to_dict()["fallbacks"]
    assert fallback["reason"].startswith("args[1] is a set, whose items may change from call to call.")


def test_strict_raises_what_falls_back(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: x[x > 0] * 2, strict=True)
    with pytest.raises(FallbackError, match=r"depends on data.*From test_jit\.py:\d+"):
        fn(x)
    with pytest.raises(FallbackError):
        fn(x)
    good = pygraph.jit(lambda x: x * x.sum(), strict=True)
    assert torch.equal(good(x), x * x.sum())


@pytest.mark.parametrize("with_gradients", [False, True])
def test_strict_on_the_cpu_raises_with_gradients_as_without(with_gradients: bool) -> None:
    model, x = pygraph.jit(torch.nn.Linear(3, 2), strict=True), torch.ones(4, 3)
    for _ in range(2):
        with (
            torch.set_grad_enabled(with_gradients),
            pytest.raises(FallbackError, match=r"are on the cpu.* Move the mod"),
        ):
            model(x)


def test_strict_says_what_to_do(x: torch.Tensor) -> None:
    rows = pygraph.jit(lambda x, w: (x @ w)[x.sum(1) > 0].exp(), strict=True)
    weight = torch.ones(x.shape[-1], 2, device=x.device, requires_grad=True)
    for fn, text in (
        (pygraph.jit(lambda x: x + x.cpu().sum(), strict=True), "its result is on the cpu.* Leave it on the device"),
        (
            pygraph.jit(lambda x: x[: x.argmax().item()], strict=True),
            r"is a view whose layout depends on data\. Return a copy",
        ),
        (
            pygraph.jit(lambda x: x.flatten()[x.argmax().item()] * 2, strict=True),
            r"read from the device by value\..*index_select",
        ),
        (
            lambda x: rows(x, weight),
            r"shape of its result depends on data\. From test_jit\.py.* Keep the shape",
        ),
    ):
        with pytest.raises(FallbackError, match=text):
            fn(x)


def test_strict_changes_no_state(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: x.add_(1)[x > 0], strict=True)
    before = x.clone()
    with pytest.raises(FallbackError):
        fn(x)
    assert torch.equal(x, before)


# ---- what it looks like ----------------------------------------------------------------------------------------


def test_decorator_with_and_without_options(x: torch.Tensor) -> None:
    @pygraph.jit
    def plain(x: torch.Tensor) -> torch.Tensor:
        """Add one."""
        return x + 1

    @pygraph.jit(max_graphs=3)
    def optioned(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """Scale."""
        return x * scale

    assert torch.equal(plain(x), x + 1)
    assert torch.equal(optioned(x, scale=3.0), x * 3)
    assert (plain.__name__, plain.__doc__) == ("plain", "Add one.")
    assert str(inspect.signature(optioned)).startswith("(x: ")
    assert repr(optioned) == "<pygraph select(graphify(indirect(devicify(optioned))))>"


def test_methods(x: torch.Tensor) -> None:
    class Scaler:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        @pygraph.jit
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

        @pygraph.jit
        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale * 2

    two, three = Scaler(2.0), Scaler(3.0)
    assert torch.equal(two(x), x * 2)
    assert torch.equal(three(x), x * 3)
    assert torch.equal(two.twice(x), x * 4)
    two.scale = 5.0
    assert torch.equal(two(x), x * 5)
    assert torch.equal(two.twice(x), x * 10)


def test_exceptions_of_the_function_reach_the_caller(x: torch.Tensor) -> None:
    @pygraph.jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            fn(x)


def test_a_wrong_call_gets_the_error_of_python(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x, y: x + y)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        fn(x)


# ---- behaviour -------------------------------------------------------------------------------------------------


def test_outputs_are_fresh(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: x * 2 + 1)
    held = [fn(x + n) for n in range(5)]
    for n, result in enumerate(held):
        assert torch.equal(result, (x + n) * 2 + 1)
    assert torch.equal(fn(fn(fn(x))), x * 8 + 7)


def test_cpu_programs_run_as_they_are_and_say_so() -> None:
    fn = pygraph.jit(lambda x: x + 1)
    assert fn(torch.ones(2)).tolist() == [2.0, 2.0]
    assert "on the cpu" in str(fn.explain())


def test_modes_are_part_of_the_key(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: x @ x.t())
    fn(x)
    with torch.no_grad():
        fn(x)
    assert fn.cache_info().misses == 2


def test_gradients_outside(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: (x * x).sum())
    leaf = x.clone().requires_grad_()
    fn(leaf).backward()
    assert torch.equal(leaf.grad, 2 * x)  # pyright: ignore
    assert not fn.explain().to_dict()["fallbacks"]


def test_threads_call_at_once(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x, k: torch.relu(x * k) + 1)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            for step in range(20):
                k = float(seed * 100 + step)
                mine = torch.full((2, 3 + seed % 2), k, device=x.device)
                if not torch.equal(fn(mine, k), torch.full_like(mine, k * k + 1)):
                    wrong.append(k)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert fn.cache_info().misses == 2


def test_what_changes_at_every_call_runs_as_it_is(x: torch.Tensor) -> None:
    state = {"n": "0"}

    @pygraph.jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * int(state["n"])

    for n in range(50):
        state["n"] = str(n)
        assert torch.equal(fn(x), x * n)
    assert fn.cache_info().captures < 12
    assert "state.n changes at every call" in " ".join(str(fn.explain()).split())


def test_what_has_stopped_to_change_is_a_graph_again(
    x: torch.Tensor, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001  # each time that anybody looks, so that a trace takes some
        return now[0]

    monkeypatch.setattr(retries, "clock", clock)
    monkeypatch.setattr(retries, "cpu_clock", clock)
    state = {"n": "0"}

    @pygraph.jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * int(state["n"])

    captures: list[int] = []
    for n in range(400):
        state["n"] = str(n) if n < 30 or 100 < n < 120 else "7"
        assert torch.equal(fn(x), x * int(state["n"]))
        captures.append(fn.cache_info().captures)
        now[0] += 100.0 if n in (80, 200) else 0.0
    assert captures[29] == captures[80] == 9  # it has been given up
    assert captures[99] == 10  # and is tried again
    assert captures[-1] == captures[200] + 1 == captures[120] + 1
    assert fn.cache_info().hits > 250


def test_a_function_that_changes_for_ever_is_seldom_traced(x: torch.Tensor) -> None:
    state = {"n": "0"}
    fn = pygraph.jit(lambda x: x * int(state["n"]))
    for n in range(1200):
        state["n"] = str(n)
        assert torch.equal(fn(x), x * n)
    assert fn.cache_info().captures < 30


# ---- gradients that are read ------------------------------------------------------------------------------------


def _sgd(parameters: list[torch.Tensor]) -> Any:
    def step(rate: float) -> None:
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.sub_(rate * parameter.grad)

    return step


def _train(device: torch.device, transform: Any, set_to_none: bool, steps: int = 5) -> tuple[Any, Any]:
    model = torch.nn.Linear(2, 1, device=device)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    step = transform(_sgd(list(model.parameters())))
    for n in range(steps):
        model.zero_grad(set_to_none)
        (model(torch.full((3, 2), n + 1.0, device=device)) - n).square().mean().backward()
        step(0.01)
    return [parameter.tolist() for parameter in model.parameters()], step


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_replaced(device: torch.device, set_to_none: bool, native: bool) -> None:
    got, step = _train(device, pygraph.jit, set_to_none)
    expected, _ = _train(device, lambda fn: fn, set_to_none)
    assert got == expected
    # Another gradient at the second call is the sign that it will be another one at every call.
    assert step.engine.shared.counts.compilations == (3 if set_to_none else 1)
    assert step.cache_info().misses == (2 if set_to_none else 1)  # calls in which something was compiled


def test_gradients_that_change_at_every_call_are_passed(device: torch.device) -> None:
    got, step = _train(device, pygraph.jit, True, steps=40)
    assert got == _train(device, lambda fn: fn, True, steps=40)[0]
    assert step.cache_info().hits == 38
    assert "no fallbacks" in str(step.explain())


def test_an_optimizer_that_is_closed_over(device: torch.device) -> None:
    def train(transform: Any) -> Any:
        weight = torch.nn.Parameter(torch.ones(2, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)
        step = transform(optimizer.step)
        for n in range(4):
            optimizer.zero_grad()
            (weight * (n + 1)).square().sum().backward()
            step()
        return weight.tolist()

    assert train(pygraph.jit) == train(lambda fn: fn)


def test_a_gradient_that_is_not_read_is_not_guarded(device: torch.device) -> None:
    model = torch.nn.Linear(2, 2, device=device)
    evaluate, x = (
        pygraph.jit(torch.no_grad()(lambda x: torch.ops.aten.mul(model(x), model.bias))),
        torch.ones(2, device=device),
    )
    for _ in range(4):
        evaluate(x)
        model.zero_grad()
        model(x).sum().backward()
    assert evaluate.cache_info().misses == 1


def test_the_gradient_of_an_argument_is_not_read(device: torch.device) -> None:
    fn = pygraph.jit(lambda x: x.detach() - x.grad)
    x = torch.ones(2, device=device, requires_grad=True)
    for n in range(3):
        x.grad = torch.full_like(x, n)
        assert torch.equal(fn(x), 1 - x.grad)
    with pytest.raises(TraceError, match=r"it reads args\[0\]\.grad"):
        pygraph.trace(lambda x: x if x.grad is None else x * 2)(x)


def test_the_gradient_of_a_leaf_made_inside(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().clone().requires_grad_()
        y.square().sum().backward()
        assert y.grad is not None
        return y.grad

    fast = pygraph.jit(fn)
    for n in range(3):
        assert torch.equal(
            fast(torch.full((2,), n + 1.0, device=device)), torch.full((2,), 2.0 * (n + 1), device=device)
        )
    assert fast.cache_info().captures == 1


_TABLES: dict[int, float] = {}


def test_a_function_that_fills_a_cache_in_its_first_call_is_traced_again(device: torch.device) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        if len(x) not in _TABLES:
            _TABLES[len(x)] = 2.0
        return x * _TABLES[len(x)]

    _TABLES.clear()
    function = pygraph.jit(scaled)
    for n in range(5):
        x = torch.full((4,), float(n), device=device)
        assert torch.equal(function(x), x * 2)
    assert _TABLES == {4: 2.0}
    assert function.cache_info()[:2] == (3, 2)
    assert not function.explain().to_dict()["fallbacks"]


def test_a_function_that_reads_a_list_which_grows_is_traced_a_few_times_only(device: torch.device) -> None:
    counts: list[int] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        counts.append(len(counts))
        return x * len(counts)

    function = pygraph.jit(counting)
    for n in range(30):
        assert function(torch.ones(2, device=device)).tolist() == [n + 1.0] * 2
    assert function.cache_info().misses <= limits.LIMITS.wasted_traces + 5
    report = function.explain().to_dict()
    assert "has another shape at every call" in report["in_python"][0]
    assert "has another number of items at every call" in str(report["fallbacks"])


def test_a_function_that_changes_state_where_it_computes_is_traced_a_few_times_only(device: torch.device) -> None:
    counts: list[int] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        return x * (counts.append(0) or len(counts))

    function = pygraph.jit(counting)
    for n in range(30):
        assert function(torch.ones(2, device=device)).tolist() == [n + 1.0] * 2
    assert function.engine.shared.counts.compilations <= 5
    assert "another shape at every call; it is not cut" in str(function.explain().to_dict()["fallbacks"])


def test_a_parameter_that_is_passed_is_a_parameter(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if isinstance(x, torch.nn.Parameter) else x * 3

    fast = pygraph.jit(fn)
    tensor = torch.ones(3, device=device)
    parameter = torch.nn.Parameter(tensor.clone(), requires_grad=False)
    for x in (parameter, tensor, parameter, tensor, tensor, parameter):
        assert torch.equal(fast(x), fn(x))
    assert fast.explain().to_dict()["fallbacks"] == []


def test_a_size_that_is_returned_is_one(device: torch.device) -> None:
    fast = pygraph.jit(lambda x: (x * 2, x.shape, {"size": x[0].shape}))
    for _ in range(3):
        _, shape, inner = fast(torch.ones(2, 3, device=device))
        assert shape == torch.Size((2, 3))
        assert type(shape) is type(inner["size"]) is torch.Size
    assert fast.explain().to_dict()["fallbacks"] == []


def test_too_little_memory_for_graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording needs more memory than the call itself, which then runs as it is."""
    from pygraph.calls import recording

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("it is a test")

    x = torch.ones(3).to(device)
    f, strict = pygraph.jit(lambda x: x * 2 + 1), pygraph.jit(lambda x: x * 2 + 1, strict=True)
    with monkeypatch.context() as patched:
        patched.setattr(recording, "Executable", refuse)
        for _ in range(3):
            assert f(x).tolist() == [3.0, 3.0, 3.0]
        with pytest.raises(pygraph.errors.FallbackError, match="not enough memory"):
            strict(x)
    assert [fallback["count"] for fallback in f.explain().to_dict()["fallbacks"]] == [3]
    f.cache_clear()
    assert f(x).tolist() == [3.0, 3.0, 3.0]
    assert f.cache_info().captures == 1
