"""Native replays, on the emulated device: its graphs get C functions that do what CUDA's do."""

from __future__ import annotations

import collections
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

import pygraph
from pygraph.process import extension
from pygraph.runtime.emulated import driver as emulated
from pygraph.runtime.recorded_graph import LaunchInPython, NativeCommit

pytestmark = pytest.mark.skipif(extension.start(wait=True) is None, reason=str(extension.reason()))

STREAM = 2**63 + 5  # a handle may use all bits


class Fake:
    """C functions as of the CUDA driver, whose graphs and nodes are numbers."""

    def __init__(self) -> None:
        self.graphs: dict[int, Any] = {}
        self.commits: list[tuple[int, int]] = []
        self.launches: list[tuple[int, int]] = []
        self.refuse: str | None = None
        self.capturing = 0
        self.stream = STREAM
        word = ctypes.c_uint64
        self.commit3 = ctypes.CFUNCTYPE(ctypes.c_int, word, word, word)(self._commit)
        self.commit4 = ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, word)(self._commit_in)
        self.launch = ctypes.CFUNCTYPE(ctypes.c_int, word, word)(self._launch)
        self.status = ctypes.CFUNCTYPE(ctypes.c_int, word, ctypes.POINTER(ctypes.c_int))(self._status)

    def _commit(self, graph: int, node: int, params: int) -> int:
        if self.refuse == "commit":
            return 1
        assert params == self.graphs[graph].params_address(node)
        self.graphs[graph].commit(node)
        self.commits.append((graph, node))
        return 0

    def _commit_in(self, graph: int, node: int, params: int, context: int) -> int:
        assert context == 77
        return self._commit(graph, node, params)

    def _launch(self, graph: int, stream: int) -> int:
        if self.refuse == "launch":
            return 1
        assert stream == STREAM
        self.graphs[graph].replay()
        self.launches.append((graph, stream))
        return 0

    def _status(self, stream: int, status: Any) -> int:
        status[0] = self.capturing
        return 0


def address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    fake = Fake()
    driver = type(emulated.driver())
    graph = emulated.EmulatedGraph
    pool = emulated.EmulatedPool

    def native_launch(self: Any) -> tuple[int, int]:
        fake.graphs[id(self)] = self
        return address(fake.launch), id(self)

    def native_commit(self: Any, node: int) -> NativeCommit:
        function, context = (fake.commit3, 0) if node % 2 else (fake.commit4, 77)
        return NativeCommit(address(function), id(self), node, self.params_address(node), context)

    monkeypatch.setattr(graph, "native_launch", native_launch)
    monkeypatch.setattr(graph, "native_commit", native_commit)
    monkeypatch.setattr(driver, "native_stream", lambda self: (lambda index: fake.stream, address(fake.status)))
    monkeypatch.setattr(pool, "last_stream", ctypes.c_int64(STREAM - 2**64), raising=False)
    yield fake
    assert fake.commits or fake.launches or fake.refuse, "the test has used it"


def replayed(function: Any) -> int:
    return sum(made.plan.hits for made in function.engine.cache.native._made if made.plan.way == "replay")


def check(fn: Callable[..., Any], calls: list[tuple[Any, ...]], native: int | None = None) -> Any:
    """The calls give what they give eagerly, in order; all but the first two of a kind natively."""
    function = pygraph.jit(fn)
    kept: list[tuple[Any, Any]] = []
    for args in calls:
        got, expected = function(*args), fn(*args)
        kept.append((got, expected))
        for result, reference in kept:  # those of earlier calls stay as they were
            torch.testing.assert_close(result, reference)
    assert replayed(function) == (len(calls) - 2 if native is None else native)
    return function


def vectors(count: int, *, size: int = 5) -> list[torch.Tensor]:
    return [torch.randn(size, device="emu") for _ in range(count)]


def test_fresh_results_at_live_addresses(fake: Fake) -> None:
    function = check(lambda x: torch.relu(x) + 1, [(x,) for x in vectors(6)])
    assert len(fake.launches) == 4
    x = vectors(1)[0]
    results = {function(x).data_ptr() for _ in range(3)}
    torch.testing.assert_close(function(function(x)), torch.relu(torch.relu(x) + 1) + 1)
    assert results


def test_many_inputs(fake: Fake) -> None:
    def fn(*xs: torch.Tensor) -> torch.Tensor:
        return functools.reduce(torch.add, xs)

    check(fn, [tuple(vectors(32)) for _ in range(4)])


@pytest.mark.parametrize("first", ["apart", "alias"])
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("others", [0, 9])
def test_foreign_aliases_between_replays(fake: Fake, first: str, start: int, others: int) -> None:
    """Another storage over the same addresses is no disjoint memory, wherever it begins."""

    def fn(a: torch.Tensor, b: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        result = b * 2
        a.mul_(3)
        return functools.reduce(torch.add, more, result)

    def alias(x: torch.Tensor) -> torch.Tensor:
        return emulated.driver().tensor_at(x.data_ptr(), tuple(x.shape), tuple(x.stride()), x.dtype)

    function = pygraph.jit(fn)
    order = ["apart", "apart", "apart", "alias", "apart", "alias", "alias", "alias", "apart"]
    native: list[str] = []
    for name in order if first == "apart" else ["alias", *order]:
        results: list[torch.Tensor] = []
        for run in (fn, function):
            x = torch.arange(8.0, device="emu")
            y = torch.arange(8.0, device="emu").flip(0)
            b = alias((x if name == "alias" else y)[start : start + 6])
            before = replayed(function)
            results += [run(x[:6], b, *(torch.ones(6, device="emu") for _ in range(others))), x]
            native += [name] * (replayed(function) - before)
        assert torch.equal(results[0], results[2])
        assert torch.equal(results[1], results[3])
    assert native.count("apart") >= 2
    assert start == 0 or "alias" not in native


def test_only_what_changed_is_sent(fake: Fake) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x.exp())
        out.add_(y)

    x, y, out = vectors(3)
    function = pygraph.jit(fn)
    for _ in range(3):
        function(x, y, out)
    fake.commits.clear()
    function(x, y, out)
    assert fake.commits == []
    other = vectors(1)[0]
    function(x, other, out)
    assert len(fake.commits) == 1
    torch.testing.assert_close(out, x.exp() + other)


@pytest.mark.parametrize("numbers", [(0.5, -0.0, 0.0, 1e30, -7.25), (3, -1, 0, 2**31 - 1, 5)])
def test_numbers(fake: Fake, numbers: tuple[Any, ...]) -> None:
    x = torch.ones(4, device="emu")
    check(lambda x, k: x * k, [(x, k) for k in (*numbers, *numbers)])
    check(lambda x, k: 1 / (x * k), [(x, k) for k in numbers])
    if isinstance(numbers[0], int):
        check(lambda x, k: x.long() + k, [(x, k) for k in numbers])


def test_numpy_numbers(fake: Fake) -> None:
    import numpy as np

    x = torch.ones(4, device="emu")
    for kind in (np.float64, np.float32, np.int64, np.int32):
        check(lambda x, k: x * k, [(x, kind(k)) for k in (1, 2, 3, 4)])


def test_results_of_every_kind(fake: Fake) -> None:
    def several(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = x + y
        return a, [x * 2, None], {"same": a, "number": 3}, y

    def views(x: torch.Tensor) -> Any:
        a, b = (x + 1).reshape(2, 3).unbind(0)
        return a.t() if a.dim() == 2 else a, b

    x, y = vectors(2, size=6)
    calls = [(torch.randn(6, device="emu"), y) for _ in range(4)]
    function = check(several, calls)
    result = function(x, y)
    assert result[2]["same"] is result[0]
    assert result[3] is y
    check(lambda x: (x + 1, x * 2), [(v,) for v in vectors(4)])
    check(lambda x: [x + 1], [(v,) for v in vectors(4)])
    check(lambda x: (x + 1,), [(v,) for v in vectors(4)])


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: (a, [b, (), {}], {"z": (a, [None]), "a": {3: b, (1, 2): []}}),
        lambda a, b: [[[[a]]], ((b,),)],
        lambda a, b: {"only": a, "number": 3},
        lambda a, b: (Pair(a, [b]), {"x": a}),
        lambda a, b: [collections.OrderedDict(b=b, a=a), (a,)],
    ],
    ids=["all kinds", "deep", "dict", "namedtuple", "ordered"],
)
def test_containers_of_results(fake: Fake, make: Callable[[Any, Any], Any]) -> None:
    """New ones for every call, with the same keys in the same order; nothing keeps what is in them."""
    function = pygraph.jit(lambda x: make(x + 1, x * 2))
    kept: list[Any] = []
    alive: list[weakref.ref[torch.Tensor]] = []
    for index, x in enumerate(vectors(5)):
        result, expected = function(x), make(x + 1, x * 2)
        leaves, tree = pytree.tree_flatten(result)
        others, wanted = pytree.tree_flatten(expected)
        assert repr(tree) == repr(wanted)
        assert list(map(type, leaves)) == list(map(type, others))
        torch.testing.assert_close(leaves, others)
        if index >= 2:
            alive += [weakref.ref(t) for t in leaves if isinstance(t, torch.Tensor)]
        _spoil(result)
        kept.append(result)
    assert replayed(function) == 3
    del result, leaves, kept
    assert not any(ref() is not None for ref in alive)


def _spoil(container: Any) -> None:
    """Change every container that can be changed."""
    if isinstance(container, dict | list | tuple):
        for child in list(container.values() if isinstance(container, dict) else container):
            _spoil(child)
    if isinstance(container, dict | list):
        container.clear()


def test_results_are_made_as_in_python(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).t()

    x = torch.randn(2, 3, device="emu")
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with context():
            function = pygraph.jit(fn)
            results = [function(x) for _ in range(3)]
            assert replayed(function) == 1
            for attribute in ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn"):
                assert getattr(results[1], attribute) == getattr(results[2], attribute), attribute
            for method in ("stride", "storage_offset", "is_inference", "is_contiguous"):
                assert getattr(results[1], method)() == getattr(results[2], method)(), method
            assert results[1].untyped_storage().nbytes() == results[2].untyped_storage().nbytes()
            assert torch.is_grad_enabled() == (context is not torch.no_grad and context is not torch.inference_mode)


def test_python_and_native_calls_in_turn(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = lambda x, k: torch.relu(x) * k  # noqa: E731
    function = pygraph.jit(fn)
    x, y = vectors(2)
    for step in range(12):
        native = function.engine.cache.native.dispatch
        if step % 3 == 2:
            function.engine.cache.native.dispatch = None
        for tensor, number in ((x, 2.0), (y, 2.0), (y, float(step))):
            torch.testing.assert_close(function(tensor, number), fn(tensor, number))
        function.engine.cache.native.dispatch = native or function.engine.cache.native.dispatch
    assert function.cache_info()[:2] == (35, 1)


@pytest.mark.parametrize("refused", ["commit", "launch"])
def test_after_a_refusal_everything_is_sent_again(fake: Fake, refused: str) -> None:
    fn = lambda x: torch.relu(x) + 1  # noqa: E731
    function = pygraph.jit(fn)
    for x in vectors(3):
        function(x)
    fake.refuse = refused
    for x in vectors(2):
        torch.testing.assert_close(function(x), fn(x))
    assert replayed(function) == 1, "Python served those"
    fake.refuse = None
    for x in vectors(2):
        torch.testing.assert_close(function(x), fn(x))
    assert replayed(function) == 3


def test_another_stream_or_a_capture_is_left_to_python(fake: Fake) -> None:
    function = pygraph.jit(torch.relu)
    x = vectors(1)[0]
    for _ in range(3):
        function(x)
    launches = len(fake.launches)
    fake.stream = 3
    torch.testing.assert_close(function(x), torch.relu(x))
    fake.stream, fake.capturing = STREAM, 1
    torch.testing.assert_close(function(x), torch.relu(x))
    assert len(fake.launches) == launches == replayed(function)
    fake.capturing = 0
    function(x)
    assert replayed(function) == launches + 1


def test_what_runs_through_python_looks_at_the_stream_too(fake: Fake) -> None:
    function = pygraph.jit(lambda x: (x.view(-1), x * 2))
    x = torch.ones(2, 2, device="emu")
    for _ in range(3):
        function(x)
    assert {made.plan.way for made in function.engine.cache.native._made} == {"executable"}

    def served() -> int:
        return sum(made.plan.hits for made in function.engine.cache.native._made)

    assert served() == 1
    fake.capturing = 1
    function(x)
    fake.stream, fake.capturing = 3, 0
    function(x)
    assert served() == 1
    fake.stream = STREAM
    assert torch.equal(function(x)[1], x * 2)
    assert served() == 2
    fake.refuse = "nothing was launched"


def test_autograd_notices_what_a_replay_updates(fake: Fake) -> None:
    state = torch.zeros(4, device="emu")
    function = pygraph.jit(lambda x, y: (x.add_(y), state.add_(y))[0] * 2)
    x, y = torch.ones(4, device="emu"), torch.ones(4, device="emu")
    for call in range(5):
        before = x._version, y._version, state._version
        function(x, y)
        after = x._version, y._version, state._version
        assert [a > b for a, b in zip(after, before, strict=True)] == [True, False, True], call
    assert replayed(function) == 3
    with torch.inference_mode():
        inference = torch.ones(4, device="emu")
        for _ in range(3):
            function(inference, y)


def test_what_draws_random_numbers_or_has_more_than_a_graph_is_run_by_python(fake: Fake) -> None:
    x = vectors(1)[0]
    function = pygraph.jit(lambda x: (torch.relu(x) + 1, torch.sigmoid(x).sum().item()))
    for _ in range(4):
        function(x)
    assert replayed(function) == 0
    pygraph.jit(torch.relu)(x)
    fake.refuse = "nothing was launched"


@pytest.mark.parametrize("options", [{"reuse_outputs": True}, {"donate_argnums": 0}], ids=str)
def test_results_in_memory_that_is_not_fresh_are_left_to_python(fake: Fake, options: dict[str, Any]) -> None:
    function = pygraph.jit(lambda x: torch.relu(x) + 1, **options)
    for x in vectors(4):
        expected = torch.relu(x) + 1
        torch.testing.assert_close(function(x), expected)
    assert replayed(function) == 0
    pygraph.jit(torch.relu)(vectors(1)[0])
    fake.refuse = "nothing was launched"


def test_counters_include_native_replays(fake: Fake) -> None:
    from pygraph.calls.plans import count_replays

    counters = emulated.driver().counters
    function = pygraph.jit(torch.relu)
    for x in vectors(2):
        function(x)
    count_replays()
    before = counters.replays, counters.launches, counters.patches
    for x in vectors(3):
        function(x)
    native = fake.commits
    count_replays()
    # The fake replays and commits through the emulated graph, which counts as well.
    assert counters.replays - before[0] == 6
    assert counters.patches - before[2] >= len(native) > 0


# ---- graphs that draw random numbers, which are launched in Python -------------------------------------------------


def launching(fake: Fake, monkeypatch: pytest.MonkeyPatch, launch: Callable[[Any], bool]) -> None:
    def replay(graph: Any) -> bool:
        done = launch(graph)
        fake.launches += [(id(graph), STREAM)] * done
        return done

    def native_launch(self: Any) -> LaunchInPython:
        fake.graphs[id(self)] = self
        return LaunchInPython(lambda: True, functools.partial(replay, self))

    monkeypatch.setattr(emulated.EmulatedGraph, "native_launch", native_launch)


def really(graph: Any) -> bool:
    graph.replay()
    return True


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5) + 1


def test_random_numbers(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    launching(fake, monkeypatch, really)
    function = pygraph.jit(dropped)
    for seed in range(5):
        x = vectors(1, size=50)[0]
        torch.manual_seed(seed)
        expected = [dropped(x), torch.rand(3, device="emu")]
        torch.manual_seed(seed)
        torch.testing.assert_close([function(x), torch.rand(3, device="emu")], expected)
    assert replayed(function) == 3
    assert len(fake.launches) == 3


def test_a_launch_that_cannot_be_made(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python does the call instead, and sends every pointer again."""
    refusing = False

    def launch(graph: Any) -> bool:
        return not refusing and really(graph)

    launching(fake, monkeypatch, launch)
    function = pygraph.jit(dropped)
    for turn in range(8):
        refusing = turn in (4, 5)
        x = vectors(1)[0]
        torch.manual_seed(turn)
        expected = dropped(x)
        torch.manual_seed(turn)
        torch.testing.assert_close(function(x), expected)
    assert replayed(function) == 4


def test_a_launch_that_fails(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = False

    def launch(graph: Any) -> bool:
        if failing:
            raise KeyboardInterrupt
        return really(graph)

    launching(fake, monkeypatch, launch)
    function = pygraph.jit(dropped)
    for turn in range(7):
        failing = turn == 4
        x = vectors(1)[0]
        torch.manual_seed(turn)
        expected = dropped(x)
        torch.manual_seed(turn)
        if failing:
            with pytest.raises(KeyboardInterrupt):
                function(x)
        else:
            torch.testing.assert_close(function(x), expected)


def test_a_call_inside_of_a_launch(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a collection: it runs as it is, and a cache that it clears is cleared after the call."""
    inside: list[Any] = []

    def launch(graph: Any) -> bool:
        if len(fake.launches) == 1:
            state = torch.get_rng_state()
            inside.append(function(vectors(1)[0]))
            torch.set_rng_state(state)
            function.cache_clear()
        return really(graph)

    launching(fake, monkeypatch, launch)
    function = pygraph.jit(lambda x: torch.nn.functional.dropout(x, 0.0) + torch.rand_like(x) * 0 + 1)
    for _ in range(8):
        x = vectors(1)[0]
        torch.testing.assert_close(function(x), x + 1)
    assert len(inside) == 1
    assert len(fake.launches) > 2


# ---- steps of training, which let go of the gradients that they replace ---------------------------------------------


class Training:
    """A model with two layers, whose step has been replayed natively, and the same one in eager."""

    def __init__(self, p: float = 0.0) -> None:
        self.mine, self.theirs = self._made(p, jitted=True), self._made(p, jitted=False)

    @staticmethod
    def _made(p: float, *, jitted: bool) -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Dropout(p), torch.nn.Linear(5, 3)).to("emu")
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return net, pygraph.jit(step) if jitted else step

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.mine[0].parameters()]

    def check(self, steps: int = 1) -> None:
        """Some steps, all as in eager."""
        for x in vectors(steps):
            found: list[Any] = []
            for net, step in (self.mine, self.theirs):
                torch.manual_seed(1)
                found.append((step(x), [parameter.grad for parameter in net.parameters()], net.state_dict()))
            torch.testing.assert_close(found[0], found[1])
            self.latest = x  # so that the next one lies elsewhere, and its address must be sent

    def check_failed(self) -> None:
        """After a step that has failed gradients are as after ``zero_grad``, and nothing else has changed."""
        assert self.gradients == [None] * 4
        for parameter in self.theirs[0].parameters():
            parameter.grad = None
        torch.testing.assert_close(self.mine[0].state_dict(), self.theirs[0].state_dict())


def test_new_gradients_are_where_replaced_ones_were(fake: Fake) -> None:
    """So that their pointers need not be sent again."""
    training = Training()
    training.check(4)
    (_, step), (x,) = training.mine, vectors(1)
    places: list[list[int]] = []
    for _ in range(4):
        sent = len(fake.commits)
        step(x)
        places.append([gradient.data_ptr() for gradient in training.gradients if gradient is not None])
    assert places[1:] == places[:1] * 3
    assert len(fake.commits) == sent


@pytest.mark.parametrize(("refuse", "text"), [("commit", "refused to update"), ("launch", "could not be launched")])
def test_a_step_that_the_driver_refuses(fake: Fake, refuse: str, text: str) -> None:
    training = Training()
    training.check(4)
    fake.refuse = refuse
    with pytest.raises(RuntimeError, match=text):
        training.mine[1](*vectors(1))
    fake.refuse = None
    training.check_failed()
    training.check(4)


def test_a_step_without_memory_for_its_results(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.check(4)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    (x,) = vectors(1)
    with monkeypatch.context() as patch:
        patch.setattr(emulated.memory.allocator, "allocate", refuse)
        with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
            training.mine[1](x)
    training.check_failed()
    training.check(4)


@pytest.mark.parametrize("ready", [True, False])
def test_a_step_that_draws_and_cannot_be_launched(fake: Fake, monkeypatch: pytest.MonkeyPatch, ready: bool) -> None:
    """What is known before gradients are let go of is left to Python; what is found out after that is an error."""
    refusing = False

    def native_launch(self: Any) -> LaunchInPython:
        fake.graphs[id(self)] = self

        def launch() -> bool:
            fake.launches.append((id(self), STREAM))
            return not refusing and really(self)

        return LaunchInPython(lambda: ready or not refusing, launch)

    monkeypatch.setattr(emulated.EmulatedGraph, "native_launch", native_launch)
    training = Training(0.5)
    training.check(4)
    before = len(fake.launches)
    refusing = True
    if ready:
        with pytest.raises(RuntimeError, match="could not be launched"):
            training.mine[1](*vectors(1))
        training.check_failed()
    else:
        training.check(2)
        assert len(fake.launches) == before
    refusing = False
    training.check(4)
    assert len(fake.launches) > before


def test_a_cache_that_is_cleared_while_gradients_go(fake: Fake) -> None:
    """It is cleared after the call."""
    training = Training()
    training.check(4)
    gradient, step = training.gradients[0], training.mine[1]
    assert gradient is not None
    watching = weakref.ref(gradient, lambda _: step.cache_clear())  # pyright: ignore
    del gradient
    training.check(4)
    assert watching() is None
